"""Arguments that cannot work: one short line that names the argument and what belongs there, raised by the call. And
options that calls pass on: the same names everywhere, and a misspelled one is named.
"""

import inspect

import pytest
import torch
from support.state.checkpoints import CACHE
from support.state.tracebacks import frames_in

import dcp_datastates as ds
from dcp_datastates.config import WriterOptions
from dcp_datastates.loading.fit import Fit, FitOptions, LoadOptions

MODEL = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])
STATE = {"model": MODEL, "t": torch.ones(5000)}


def _manager(root, **options):
    return ds.CheckpointManager(root, every=1, save_last=False, host_cache_size=CACHE, **options)


def _optimizer():
    return torch.optim.SGD(MODEL.parameters(), 0.1)


SWAPPED = "it is load(path, state) and save(state, path)"
MISTAKES = {
    "async_save(path, state)": (lambda p: ds.async_save(p, STATE), "it is save(state, path)"),
    "save(path, state)": (lambda p: ds.save(p, STATE), "it is save(state, path)"),
    "load(state, path)": (lambda p: ds.load(STATE, p), SWAPPED),
    "load(None)": (lambda p: ds.load(None), "load(path, state) needs the checkpoint's directory"),
    "save(state, None)": (lambda p: ds.save(STATE, None), "pass path"),
    "latest(None)": (lambda p: ds.latest(None), "path=None"),
    "latest(state)": (lambda p: ds.latest(STATE), SWAPPED),
    "verify(state)": (lambda p: ds.verify(STATE), SWAPPED),
    "inspect(state)": (lambda p: ds.inspect(STATE), SWAPPED),
    "convert(state)": (lambda p: ds.convert(STATE, p, to="torch"), SWAPPED),
    "retain(state)": (lambda p: ds.retain(STATE, keep=1), SWAPPED),
    "delete(state)": (lambda p: ds.delete(STATE), SWAPPED),
    "writer(state)": (lambda p: ds.DataStatesWriter(STATE), SWAPPED),
    "reader(state)": (lambda p: ds.DataStatesReader(STATE).read_metadata(), SWAPPED),
    "manager(state)": (lambda p: _manager(STATE), SWAPPED),
    "manager.save(state, step)": (lambda p: _manager(p).save(STATE, 0), "it is save(step, state)"),
    "manager.save(step, model)": (lambda p: _manager(p).save(0, MODEL), "pass a dict"),
    "track(model)": (lambda p: ds.track(MODEL), "takes a torch.optim.Optimizer"),
    "track(also=model)": (lambda p: ds.track(_optimizer(), also=MODEL), "module.parameters()"),
    "track(also=names)": (lambda p: ds.track(_optimizer(), also=["weight"]), "not a str"),
    "save in a backend": (lambda p: ds.save(STATE, p, process_group="gloo"), "new_group"),
    "load in a backend": (lambda p: ds.load(p, {}, process_group="gloo"), "new_group"),
    "latest in a backend": (lambda p: ds.latest(p, process_group="gloo"), "new_group"),
    "writer in a backend": (lambda p: ds.DataStatesWriter(p, process_group="gloo"), "new_group"),
    "manager in a backend": (lambda p: _manager(p, process_group="gloo"), "new_group"),
    "save, reads": (lambda p: ds.save(STATE, p, reads="never"), "reads='never'"),
    "async_save, count": (lambda p: ds.async_save(STATE, p, max_in_flight=0), "max_in_flight=0"),
    "reader, unexpected": (lambda p: ds.DataStatesReader(p, unexpected=1), "unexpected=1"),
    "reader, exclude": (lambda p: ds.DataStatesReader(p, exclude=[None]), "exclude=[None]"),
    "load, rename": (lambda p: ds.load(p, rename=3), "rename=3"),
    "configure_engine": (lambda p: ds.configure_engine(copy_threads=0), "copy_threads=0"),
    **{
        f"verify, threads={n!r}": (lambda p, n=n: ds.verify(p, threads=n), f"threads={n!r}")
        for n in (0, -1, 1.5, "2", True)
    },
    "convert, format": (lambda p: ds.convert(p, p, "xml"), "to='xml'"),
    "manager, keep": (lambda p: _manager(p, keep=0), "keep=0"),
    "async_save, misspelled": (
        lambda p: ds.async_save(STATE, p, host_cach_size=1),
        "'host_cach_size'; did you mean 'host_cache_size'",
    ),
    "save, misspelled": (lambda p: ds.save(STATE, p, read=1), "'read'; did you mean 'reads'"),
    "manager, misspelled": (
        lambda p: _manager(p, max_in_fligt=1),
        "'max_in_fligt'; did you mean 'max_in_flight'",
    ),
    "load, misspelled": (lambda p: ds.load(p, renames=1), "'renames'; did you mean 'rename'"),
    "load, misspelled beyond recognition": (lambda p: ds.load(p, allow_casts=1), "'allow_casts'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line_that_says_what_belongs_there(mistake, tmp_path):
    call, words = MISTAKES[mistake]
    with pytest.raises(ds.errors.DataStatesError) as raised:
        call(tmp_path / "c")
    message = str(raised.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 250
    assert 1 <= frames_in(raised.value) <= 3
    assert not (tmp_path / "c").exists()


def test_the_options_that_are_passed_on_are_those_of_the_writer():
    parameters = inspect.signature(ds.DataStatesWriter.__init__).parameters
    passed = set(parameters) - {"self", "path", "process_group"}
    assert passed == set(WriterOptions.__annotations__)


def test_the_options_of_a_load_are_those_that_are_checked():
    checked = {each for each in Fit.__dataclass_fields__ if each != "only"}
    assert set(FitOptions.__annotations__) == checked
    assert set(LoadOptions.__annotations__) == {*checked, "only", "allow_objects", "share_reads"}
