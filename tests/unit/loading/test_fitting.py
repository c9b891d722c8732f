"""What of a checkpoint goes into what of a state: names, patterns, renaming, and errors that name everything."""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.state.checkpoints import assert_same, save, zeros
from support.state.wrapped import Blocks
from support.tiers import tries
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_datastates
from dcp_datastates import load
from dcp_datastates.dcp.reader import reads_of
from dcp_datastates.errors import ConfigurationError, DataStatesError, IncompatibleStateError
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.reads import Reads
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.fitting import Fitting
from dcp_datastates.loading.load import load_with
from dcp_datastates.loading.session import load_session
from dcp_datastates.loading.stored import Stored
from dcp_datastates.ranks.rank_set import ALONE


def _state():
    return {
        "model": {"layers": [{"w": torch.ones(2, 3), "b": torch.ones(2)} for _ in range(3)]},
        "step": 7,
    }


def _zeros():
    return {**zeros(_state()), "step": 0}


@pytest.fixture
def path(tmp_path):
    save(_state(), tmp_path / "c")
    return tmp_path / "c"


def test_a_load_plans_what_stock_dcp_plans(tmp_path):
    state = {
        "full": torch.ones(2, 3),
        "part": torch.ones(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "scalar": torch.tensor(1.0),
        "empty": torch.ones(0, 3),
        "transposed": torch.ones(2, 3).T,
        "step": 7,
    }
    save(state, tmp_path / "c")
    table = open_committed(tmp_path / "c").table
    stock = DefaultLoadPlanner()
    stock.set_up_planner(dict(state), metadata_of(table), True)
    stored = Stored(table, [tmp_path / "c"])
    expected = _rows(Reads.joined(reads_of(stock.create_local_plan().items, stored)))
    assert _rows(Reads.joined(Fitting(Fit.of({}), stored).reads(dict(state)))) == expected


def _rows(reads):
    """What is read, row by row."""
    paths = [reads.paths[file] for file in reads.files]
    columns = paths, reads.begins.tolist(), reads.stored.tolist(), map(str, reads.dtypes)
    ragged = map(reads.sizes, (reads.chunk_sizes, reads.offsets, reads.lengths))
    return sorted(zip(reads.names, *columns, *ragged, strict=True))


def _taken(state):
    """The names of the values that were loaded."""
    found = [
        f"{n}.{k}"
        for n, layer in enumerate(state["model"]["layers"])
        for k in layer
        if layer[k].any()
    ]
    return {*found, *(["step"] if state["step"] == 7 else [])}


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, {"0.w", "0.b", "1.w", "1.b", "2.w", "2.b", "step"}),
        ({"only": "step"}, {"step"}),
        ({"only": "*.b"}, {"0.b", "1.b", "2.b"}),
        ({"only": ["model.layers.1", "*.2.w"]}, {"1.w", "1.b", "2.w"}),
        ({"only": "model", "exclude": "model.layers.?.w"}, {"0.b", "1.b", "2.b"}),
        ({"exclude": ["model.layers.0", "step"]}, {"1.w", "1.b", "2.w", "2.b"}),
        ({"exclude": "nothing.*"}, {"0.w", "0.b", "1.w", "1.b", "2.w", "2.b", "step"}),
    ],
)
def test_only_and_exclude_choose_by_names_prefixes_and_globs(options, taken, path, caplog):
    state = _zeros()
    load(path, state, **options)
    assert _taken(state) == taken
    assert "unread" not in caplog.text


def test_what_an_empty_checkpoint_lacks_is_named(tmp_path):
    save({}, tmp_path / "c")
    with pytest.raises(IncompatibleStateError) as refused:
        load(tmp_path / "c", _zeros())
    assert len(refused.value.missing) == 7


@pytest.mark.parametrize(
    "rename",
    [
        {"model.layers.": "net.blocks."},
        {"model.layers.*.w": "net.blocks.*.w", "model.layers.*.b": "net.blocks.*.b"},
        lambda name: name.replace("model.layers", "net.blocks"),
    ],
)
@pytest.mark.parametrize("into", [True, False])
def test_a_rename_gives_stored_values_the_programs_names(rename, into, path):
    if into:
        state = {"net": {"blocks": _zeros()["model"]["layers"]}, "step": 0}
        load(path, state, rename=rename)
    else:
        state = load(path, rename=rename)
        blocks = [state.pop(f"net.blocks.{n}.{k}", None) for n in range(3) for k in "wb"]
        if blocks[0] is not None:  # the names are new: no path is known for them
            state["net"] = {
                "blocks": [{"w": blocks[2 * n], "b": blocks[2 * n + 1]} for n in range(3)]
            }
        elif "net.blocks" in state:
            state["net"] = {"blocks": state.pop("net.blocks")}
    assert_same(state, {"net": {"blocks": _state()["model"]["layers"]}, "step": 7})


def test_only_and_exclude_are_about_the_programs_names(path):
    state = {"net": {"layers": _zeros()["model"]["layers"]}, "step": 0}
    load(path, state, only="net", rename={"model": "net"}, exclude="net.layers.0")
    assert _taken({"model": state["net"], "step": state["step"]}) == {"1.w", "1.b", "2.w", "2.b"}


def test_wrappers_are_renamed_with_their_parts(tmp_path):
    stored = Blocks(torch.rand(8, 4), torch.rand(4))
    dcp_datastates.async_save({"old": {"w": stored}}, tmp_path).result()
    state = {"new": {"w": Blocks(torch.zeros(8, 4), torch.zeros(4))}}
    load(tmp_path, state, rename={"old.": "new."}, unexpected="error")
    for name in ("codes", "scales"):
        assert torch.equal(getattr(state["new"]["w"], name), getattr(stored, name))


def test_two_names_that_become_one_are_refused(path):
    with pytest.raises(ConfigurationError, match="would both have the name 'x'"):
        load(path, _zeros(), rename=lambda _: "x")


def _cycle():
    state = {"w": torch.zeros(2)}
    state["again"] = [state]
    return state


def _same_names():
    return {
        "model.layers": [{"w": torch.zeros(2, 3)}],
        "model": {"layers": [{"w": torch.zeros(2, 3)}]},
    }


UNFIT = {
    "a name that is not stored": lambda: {**_zeros(), "new": torch.zeros(1)},
    "a surrogate in a name": lambda: {**_zeros(), "\udc80": torch.zeros(1)},
    "another shape": lambda: {
        "step": torch.zeros(3),
        "model": {"layers": [{"w": torch.zeros(5, 3)}]},
    },
    "another dtype": lambda: {"model": {"layers": [{"w": torch.zeros(2, 3, dtype=torch.int8)}]}},
    "no tensor": lambda: {"model": {"layers": [{"w": 5}]}},
    "two values with one name": _same_names,
    "a cycle": _cycle,
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_is_one_error_of_this_package(kind, path):
    with pytest.raises(IncompatibleStateError) as refused:
        load(path, UNFIT[kind]())
    assert isinstance(refused.value, DataStatesError)
    assert not isinstance(refused.value, CheckpointException)
    str(refused.value).encode()
    copied = pickle.loads(pickle.dumps(refused.value))
    assert (copied.missing, copied.unfit) == (refused.value.missing, refused.value.unfit)


def test_the_error_has_all_names_with_those_that_are_like_them(path):
    state = _zeros()
    state["model"]["layrs"] = state["model"].pop("layers")
    with pytest.raises(IncompatibleStateError) as refused:
        load(path, state)
    assert len(refused.value.missing) == len(refused.value.unexpected) == 6
    text = str(refused.value)
    assert all(repr(name) in text for name in (*refused.value.missing, *refused.value.unexpected))
    assert "'model.layrs.2.b' (was it 'model.layers.2.b'?)" in text


@pytest.mark.parametrize("answer", ["error", "warn", "ignore"])
def test_what_is_missing_and_what_is_unexpected_are_answered_as_chosen(answer, path, caplog):
    def given():
        state = {**_zeros(), "new": torch.zeros(1)}
        del state["step"]
        return state

    for option in ("missing", "unexpected"):
        caplog.clear()
        others = {"missing": "ignore", "unexpected": "ignore"}
        name = {"missing": "new", "unexpected": "step"}[option]
        if answer == "error":
            with pytest.raises(IncompatibleStateError) as refused:
                load(path, given(), **{**others, option: answer})
            assert getattr(refused.value, option) == (name,)
        else:
            state = given()
            load(path, state, **{**others, option: answer})
            assert _taken({**state, "step": 7}) >= {"0.w", "2.b"}
            assert (repr(name) in caplog.text) == (answer == "warn")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"missing": True}, "missing=True"),
        ({"unexpected": "no"}, "unexpected='no'"),
        ({"cast": 1}, "cast=1"),
        ({"rename": 3}, "rename=3"),
        ({"rename": {"a": 3}}, "rename="),
        ({"rename": {"a.*": "b.*.*"}}, "each"),
        ({"exclude": 3}, "exclude=3"),
        ({"excludes": "a"}, "did you mean 'exclude'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, match, path):
    with pytest.raises(ConfigurationError, match=match):
        load(path, _zeros(), **options)


# ---- what is stored and what the program has, both at random; the expectation is made from their flat names -----

NAMES = st.sampled_from(["a", "b", "c", "0", "long name"])
LEAVES = st.one_of(st.integers(0, 9), st.integers(1, 3).map(lambda n: torch.full((n,), float(n))))
STATES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
)


def _flat(state, prefix=""):
    found = {}
    for key, value in state.items():
        found |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def _shown(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _emptied(value):
    if isinstance(value, dict):
        return {key: _emptied(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_all_that_have_another_dtype_or_shape_are_named(tmp_path):
    save(
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(5, 6)},
        tmp_path / "c",
    )
    state = {"a": torch.zeros(2).double(), "b": torch.zeros(3), "c": torch.zeros(2).half()}
    state["d"] = torch.zeros(8, 6)
    with pytest.raises(IncompatibleStateError) as raised:
        load(tmp_path / "c", state)
    assert raised.value.unfit == {
        "a": "saved as torch.float32, here torch.float64",
        "c": "saved as torch.float32, here torch.float16",
        "d": "saved with (5, 6), here (8, 6)",
    }


@pytest.mark.parametrize("examples", tries(40, 500))
def test_random_states(examples, tmp_path_factory):
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(STATES, STATES, st.sets(NAMES), st.sampled_from(["error", "ignore"]))
    def play(stored, program, replaced, missing):
        path = tmp_path_factory.mktemp("c")
        save(stored, path)
        state = _emptied(program)
        replaced = [name for name in replaced if isinstance(state.get(name), dict)]
        filled = [name for name in state if name not in replaced]
        there, here = _flat(stored), _flat(state)
        expected = _expected(there, here, replaced, filled, missing)
        before = {name: _shown(value) for name, value in here.items()}
        fit = Fit.of({"missing": missing, "unexpected": "ignore"})
        try:
            with load_session(ALONE, [path], "load()", 60) as session:
                load_with(
                    session,
                    state,
                    lambda stored: Fitting(fit, stored, filled=filled, replaced=replaced),
                )
        except IncompatibleStateError:
            assert expected is None, "it fits"
            for name, value in _flat(
                state
            ).items():  # the containers of what is replaced are the caller's to copy
                assert _shown(value) == before[name], "nothing changes"
        else:
            assert {name: _shown(value) for name, value in _flat(state).items()} == expected

    play()


def _expected(there, here, replaced, filled, missing):
    """The values after the load, by name; None if it must fail."""
    result = {}
    known = {name.split(".")[0] for name in there}
    for name, value in here.items():
        top = name.split(".")[0]
        if name in there:
            stored = there[name]
            as_tensors = isinstance(value, torch.Tensor), isinstance(stored, torch.Tensor)
            if as_tensors == (True, True) and value.shape != stored.shape and top not in replaced:
                return None
            if as_tensors == (False, True) and top not in replaced:
                return None
        elif (top in replaced and top in known) or (
            value is None and any(each.startswith(f"{name}.") for each in there)
        ):
            continue
        elif missing == "error":
            return None
        result[name] = _shown(value)
    for name, value in there.items():
        if name in here or name.split(".")[0] in {*replaced, *filled}:
            if any(name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in result):
                return None
            result[name] = _shown(value)
    return result
