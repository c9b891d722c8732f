"""What ``CheckpointManager`` makes of models, optimizers and other objects, and that it gives them back."""

import re
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from support.state.checkpoints import assert_same, raises
from support.state.loops import Stateful, manager

import dcp_datastates as ds
from dcp_datastates import PerRank, RngState
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError, UnsafeObjectError
from dcp_datastates.planning.column_planning import serialize


@pytest.fixture
def by_three_ranks(tmp_path):
    """A checkpoint of step 5 in which three ranks have a position each, and generators."""
    states = {f"rank-{rank}": serialize({"at": rank}) for rank in range(3)}
    draws = {f"rank-{rank}": serialize(RngState().state_dict()) for rank in range(3)}
    ds.save({"loader": states, "rng": draws, "step": 5}, tmp_path / "step-5")
    return tmp_path


def test_a_position_of_another_number_of_ranks_is_an_error_and_nothing_changes(by_three_ranks):
    position, state = Stateful({}), {"step": 0}
    with manager(by_three_ranks) as checkpoints:
        said = "'loader' was saved by 3 ranks, and there are 1 now", "merge="
        with raises(IncompatibleStateError, *said):
            checkpoints.restore(5, {**state, "loader": PerRank(position)})
    assert (position.state, state) == ({}, {"step": 0})


@pytest.mark.parametrize(
    "way_out", [{"missing": "warn"}, {"missing": "ignore"}, {"exclude": "loader"}]
)
def test_a_position_of_another_number_of_ranks_may_be_left(way_out, by_three_ranks, caplog):
    position, state = Stateful({}), {"step": 0}
    state["loader"] = PerRank(position)
    with manager(by_three_ranks) as checkpoints:
        checkpoints.restore(5, state, **way_out)
    assert (position.state, state["step"]) == ({}, 5)
    assert ("saved by 3 ranks" in caplog.text) == (way_out == {"missing": "warn"})


def test_merge_makes_a_state_of_all_ranks_states_in_their_order(by_three_ranks):
    position, again, given = Stateful({}), Stateful({}), []
    again.state_dict = pytest.fail  # a restore asks for no state: a loader may start its workers

    def merge(states):
        given.extend(states)
        return {"at": sum(state["at"] for state in states)}

    marked = PerRank(position, merge=merge)
    with manager(by_three_ranks) as checkpoints:
        checkpoints.restore(5, {"step": 0, "loader": marked})
        assert given == [{"at": 0}, {"at": 1}, {"at": 2}]
        assert position.state == {"at": 3}
        checkpoints.save(6, {"loader": marked}).result(60)
        checkpoints.restore(6, {"loader": PerRank(again, merge=merge)})
    assert again.state == {"at": 3}
    assert len(given) == 3, "it is for another number of ranks only"


def test_generators_of_another_number_of_ranks_go_on_as_they_are(by_three_ranks, caplog):
    before = torch.get_rng_state()
    with manager(by_three_ranks) as checkpoints:
        checkpoints.restore(5, {"rng": RngState(), "step": 0}, exclude="loader")
    assert torch.equal(torch.get_rng_state(), before)
    assert "'rng' was saved by 3 ranks, and there are 1 now: it stays as it is" in caplog.text


@pytest.mark.parametrize("given", [[3], [Stateful], [Stateful({}), 3]])
def test_what_cannot_be_marked_is_refused(given):
    with pytest.raises(ConfigurationError):
        PerRank(*given)


def two_layers():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def train(state, steps=1):
    for _ in range(steps):
        state["model"]["used"](torch.ones(2, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


@pytest.mark.parametrize("trained", ["anew", "with gradients", "by a step"])
def test_a_parameter_without_a_state_has_none_after_a_restore(trained, tmp_path):
    first, second = two_layers(), two_layers()
    train(first, 2)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, first)
    if trained == "by a step":  # the state is replaced
        train(second)
    elif trained == "with gradients":
        second["model"]["used"](torch.ones(2, 4)).sum().backward()
    with manager(tmp_path) as checkpoints:
        checkpoints.restore_latest(second)
    second["optimizer"].zero_grad()
    assert second["optimizer"].state_dict()["state"].keys() == {0, 1}
    train(first), train(second)
    assert_same(second["model"].state_dict(), first["model"].state_dict())


@pytest.mark.parametrize("gradients", [False, True])
def test_a_save_before_the_first_step_changes_nothing_and_can_be_restored(gradients, tmp_path):
    saved, plain = two_layers(), two_layers()
    calls = []
    saved["optimizer"].register_step_post_hook(lambda *_: calls.append(1))
    if gradients:
        saved["model"]["used"](torch.ones(2, 4)).sum().backward()
    with manager(tmp_path) as checkpoints:
        checkpoints.save(0, saved)
    saved["optimizer"].zero_grad()
    assert not saved["optimizer"].state
    assert calls == []
    train(saved, 3), train(plain, 3)
    assert_same(saved["model"].state_dict(), plain["model"].state_dict())

    restored = two_layers()
    train(restored, 2)
    restored["model"]["used"](torch.ones(2, 4)).sum().backward()  # and gradients are there
    with manager(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(restored) == 0
    restored["optimizer"].zero_grad()
    assert not restored["optimizer"].state
    train(restored, 3)
    assert_same(restored["model"].state_dict(), plain["model"].state_dict())


def test_random_generators_are_restored_last(tmp_path):
    class Draws(Stateful):
        def load_state_dict(self, state):
            torch.rand(3)
            super().load_state_dict(state)

    state = {"rng": RngState(), "zebra": Draws({}), "zoo": PerRank(Draws({}))}
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    expected = torch.rand(4)
    with manager(tmp_path) as checkpoints:
        checkpoints.restore_latest(state)
    assert torch.equal(torch.rand(4), expected)


def _pair(seed):
    """Two models with an optimizer each, and other objects, in containers."""
    torch.manual_seed(seed)
    models = {"generator": torch.nn.Linear(4, 4), "critics": [torch.nn.Linear(4, 4)]}
    first, second = models["generator"], models["critics"][0]
    optimizers = (torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), 0.1))
    if seed == 0:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    position = Stateful({"seen": seed})
    return {
        "models": models,
        "optimizers": optimizers,
        "others": [{"epoch": seed, "at": position, "mine": PerRank(Stateful({}))}, RngState()],
        "plain": [torch.full((3,), float(seed)), {"seed": seed}],
    }


def test_objects_with_a_state_may_lie_in_dicts_and_lists(tmp_path):
    first, second = _pair(0), _pair(1)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, first)
        drawn = torch.rand(3)
    with manager(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(second) == 1
    assert torch.equal(torch.rand(3), drawn)
    for old, new in zip(
        (first["models"]["generator"], first["models"]["critics"][0], *first["optimizers"]),
        (second["models"]["generator"], second["models"]["critics"][0], *second["optimizers"]),
        strict=True,
    ):
        assert_same(new.state_dict(), old.state_dict())
    assert second["others"][0]["epoch"] == 0
    assert second["others"][0]["at"].state == {"seen": 0}
    assert second["plain"][1] == {"seed": 0}
    assert torch.equal(second["plain"][0], torch.zeros(3))


def test_a_container_with_objects_is_stored_as_its_parts_at_the_top_are(tmp_path):
    state = _pair(0)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        flat = {f"models.{name}": model for name, model in state["models"].items()}
        flat["models.critics"] = flat["models.critics"][0]
        for each in flat.values():
            expected = {name: value.clone() for name, value in each.state_dict().items()}
            torch.nn.init.zeros_(each.weight)
            checkpoints.restore(1, flat, unexpected="ignore")
            assert_same(each.state_dict(), expected)


marks = pytest.mark.parametrize("mark", [lambda part: part, PerRank], ids=["object", "per rank"])


@pytest.mark.parametrize(
    "state",
    [
        {1: 10, "x": {2.5: torch.ones(3)}},
        {"e": {}, "f": [], "g": ()},
        Counter("abca"),
        {"deep": [OrderedDict(a=1), {"b": defaultdict(int, c=2)}]},
        {"pair": (1, 2.0), "nested": ([1], {"a": 2})},
        {"packed": 3, "other": [1]},
        {"rank-0": 3, "rank-1": 4},
        {"plain": {"a": [1, 2], "b": torch.ones(2)}, "none": None},
        *([torch.ones(2)], [(1, 2), (3, 4)], torch.ones(2), "ab", 5, None),
    ],
    ids=str,
)
@marks
def test_an_object_receives_exactly_what_it_gave(mark, state, tmp_path):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"object": mark(Stateful(state))})
        restored = Stateful({"other": 1})
        allow = "defaultdict" in repr(state)
        checkpoints.restore(1, {"object": mark(restored)}, allow_objects=allow)

    def types(value):
        if isinstance(value, dict):
            return type(value), {key: types(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value), list(map(types, value))
        return type(value)

    assert types(restored.state) == types(state)
    assert repr(restored.state) == repr(state)


@pytest.mark.parametrize("value", [5, None, [1, 2], torch.ones(3), (1,)], ids=str)
def test_a_value_where_the_program_has_an_object_or_an_empty_dict_is_given_as_it_was(
    value, tmp_path
):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"object": value, "empty": value, "within": {"a": value}})
        state = {"object": Stateful({"a": 1}), "empty": {}, "within": {"a": {}}}
        checkpoints.restore(1, state)
    found = [state["object"].state, state["empty"], state["within"]["a"]]
    assert [*map(str, found)] == [str(value)] * 3


def test_models_that_the_program_has_no_more_are_not_put_in_its_dicts(tmp_path, caplog):
    with manager(tmp_path) as checkpoints:
        saved = {"d": {"a": torch.nn.Linear(2, 2)}, "l": [torch.nn.Linear(2, 2), torch.ones(2)]}
        checkpoints.save(1, {**saved, "w": torch.ones(3)})
        state = {"d": {}, "w": torch.zeros(3)}
        checkpoints.restore(1, state)
        assert (state["d"], state["w"].sum()) == ({}, 3)
        assert "'d.a.weight'" in caplog.text
        for gone in (None, Stateful({"b": 1})):
            with raises(IncompatibleStateError, "'d", "d.a.weight"):
                checkpoints.restore(1, {"d": gone, "w": torch.zeros(3)})


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({"k": 1}, {"k": 0, "within": {"q": 1}, "list": [torch.ones(1), {"r": 2}]}),
        ({"list": [{"r": 1}]}, {"list": [{"r": 2}, {"r": 3, "s": 4}]}),
        ({"within": {"list": [{"r": 1}, 2]}}, {"within": {"q": {"r": 3}}, "list": [{"r": 3}]}),
    ],
    ids=["gone", "shorter", "other"],
)
def test_an_object_has_no_empty_dicts_left_of_what_was_not_saved(saved, here, tmp_path):
    found = Stateful(here)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"object": Stateful(saved)})
        checkpoints.restore(1, {"object": found})
    assert found.state == saved


def test_a_dict_goes_on_where_an_object_has_come_beside_it_in_the_dict_around_it(tmp_path):
    saved = {"around": {"dict": {"a": 1, "b": {2: 3}}}}
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {**saved, "x.y": {"z": 4}, "x": {"y": 5}})
        for rename, around in ((None, "around"), ({"around": "other"}, "other")):
            within = {"object": Stateful({"c": 1}), "dict": {}}
            state = {around: within, "x.y": {}}
            checkpoints.restore(1, state, missing="ignore", rename=rename)
            assert within["dict"] == saved["around"]["dict"]
            assert state["x.y"] == {"z": 4}


def test_an_object_that_is_no_more_marked_is_refused(tmp_path):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"loader": PerRank(Stateful({"a": 1})), "w": torch.ones(3)})
        state = {"loader": Stateful({"a": 2}), "w": torch.zeros(3)}
        with raises(IncompatibleStateError, "'loader'", "PerRank"):
            checkpoints.restore(1, state)
        assert (state["loader"].state, state["w"].any()) == ({"a": 2}, False)
        checkpoints.restore(1, state, exclude="loader")
    assert (state["loader"].state, state["w"].all()) == ({"a": 2}, True)


@pytest.mark.parametrize("names", [["model", "average"], ["average", "model"]], ids=str)
def test_an_object_that_begins_with_the_tensors_of_a_model_receives_its_own(names, tmp_path):
    def made(trained):
        model = torch.nn.Linear(3, 3)
        weight = model.weight.detach()  # of a new program, the model's own
        parts = {"model": model, "average": Stateful({"w": weight + 1 if trained else weight})}
        return model, parts["average"], {name: parts[name] for name in names}

    model, average, state = made(trained=True)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for left_out in ((), "model"):
            again, same, fresh = made(trained=False)
            checkpoints.restore(0, fresh, exclude=left_out)
            assert torch.equal(again.weight, model.weight) == (not left_out)
            assert torch.equal(same.state["w"], average.state["w"])


@pytest.mark.parametrize("names", [["model", "best"], ["best", "model"]], ids=str)
def test_a_dict_that_begins_with_the_tensors_of_a_model_receives_its_own(names, tmp_path):
    def made(trained):
        model = torch.nn.Linear(3, 3)
        best = {
            "weight": model.weight.detach() + 1 if trained else model.weight,
            "bias": model.bias,
        }
        tied = torch.zeros(9)
        parts = {"model": model, "best": {**best, "tied": tied, "again": tied}}
        return model, parts["best"], {name: parts[name] for name in names}

    model, best, state = made(trained=True)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        again, same, fresh = made(trained=False)
        checkpoints.restore(0, fresh)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(same["weight"], best["weight"])
    # These were saved with one value: they have one memory still.
    assert same["bias"] is again.bias
    assert same["tied"] is same["again"]


def test_an_object_whose_tensors_are_pieces_of_one_buffer_is_filled_in_place(tmp_path):
    buffer = torch.ones(12)
    pieces = {"a": buffer[:4], "b": buffer[4:].view(2, 4).t(), "none": buffer[2:2]}
    state = {"flat": Stateful(dict(pieces))}
    with manager(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        checkpoints.wait()
        buffer.zero_()
        checkpoints.restore(0, state)
    assert buffer.all()
    assert all(state["flat"].state[name] is piece for name, piece in pieces.items())


@marks
@pytest.mark.parametrize("state", [{1: re.IGNORECASE}, {"a": re.IGNORECASE, "b": {}}], ids=str)
def test_a_state_that_is_stored_with_its_types_is_refused_before_anything_changes(
    state, mark, tmp_path
):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"part": mark(Stateful(state)), "w": torch.ones(9)})
    part, w = Stateful({"as it": "was"}), torch.zeros(9)
    with manager(tmp_path) as checkpoints:
        with raises(UnsafeObjectError, "'part.", "re.RegexFlag"):
            checkpoints.restore_latest({"part": mark(part), "w": w})
        assert (part.state, w.any()) == ({"as it": "was"}, False)
        checkpoints.save(2, {"part": mark(part), "w": w}).result(60)  # it is no mixture
        checkpoints.restore(1, {"part": mark(part), "w": w}, allow_objects=True)
    assert (part.state, w.all()) == (state, True)


@pytest.mark.parametrize("missing", ["warn", "ignore"])
def test_a_part_that_the_checkpoint_lacks_stays_as_it_is(missing, tmp_path):
    parts = {"part": Stateful({1: 2}), "own": PerRank(Stateful({1: 2})), "rng": ds.RngState()}
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(9)})
        checkpoints.restore_latest({"w": torch.zeros(9), **parts}, missing=missing)
    assert parts["part"].state == parts["own"].wrapped.state == {1: 2}


@pytest.mark.parametrize("milestones", [[3, 5], [6, 7]])
def test_schedulers_of_torch_go_on(milestones, tmp_path):
    def made(of):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, of),
        ]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    def steps(optimizer, scheduler, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
        return rates

    first = made([3, 5])
    steps(*first, 1)
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"scheduler": first[1]})
        optimizer, scheduler = made(milestones)
        checkpoints.restore(1, {"scheduler": scheduler})
    optimizer.param_groups[0]["lr"] = first[0].param_groups[0]["lr"]
    assert steps(optimizer, scheduler, 8) == steps(*first, 8)


def test_a_value_within_a_tuple_cannot_be_put_back_and_says_so(tmp_path):
    state = {"both": (torch.nn.Linear(1, 1), 3)}
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with raises(ConfigurationError, "both.1", "tuple"):
            checkpoints.restore(1, {"both": (torch.nn.Linear(1, 1), 4)})


ENDLESS = {"model": torch.nn.Linear(1, 1)}
ENDLESS["again"] = ENDLESS


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({1: 1}, ["names must be strings"]),
        ({"kind": torch.nn.Linear}, ["'kind'", "class Linear"]),
        ({"a.b": 3, "a": {"b": torch.nn.Linear(1, 1)}}, ["two parts", "a.b"]),
        ({"endless": ENDLESS}, ["contains itself"]),
    ],
    ids=["a number", "a class", "a name twice", "endless"],
)
def test_a_state_that_cannot_be_named_is_refused(state, words, tmp_path):
    with manager(tmp_path) as checkpoints, raises(ConfigurationError, *words):
        checkpoints.save(1, state)
