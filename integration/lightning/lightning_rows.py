"""What users of Lightning do when they save and resume: one function for each habit.

Each is run with Lightning's own strategies and with those of this package, on one device and with DDP, and must have
the same outcome. It returns that outcome: losses, values, or the name of an error.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from torch.distributed.fsdp import fully_shard

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.lightning import (
    DataStatesDDPStrategy,
    DataStatesModelParallelStrategy,
    DataStatesSingleDeviceStrategy,
)

FAILED = "failed: "
"""An outcome that nobody expected begins so."""

ROWS: dict[str, Callable[[Use], Any]] = {}
STRATEGIES = {
    "own single": lambda **options: SingleDeviceStrategy("cpu", **options),
    "single": lambda **options: DataStatesSingleDeviceStrategy("cpu", **options),
    "own ddp": lambda **options: DDPStrategy(process_group_backend="gloo", **options),
    "ddp": lambda **options: DataStatesDDPStrategy(process_group_backend="gloo", **options),
    "fsdp2": lambda **options: DataStatesModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", **options
    ),
}


@dataclass
class Use:
    """Makes trainers of one kind, whose checkpoints lie in a folder."""

    kind: str
    folder: Path

    def trainer(self, epochs: int, *callbacks: Callback, **options: Any) -> pl.Trainer:
        """A trainer for so many epochs."""
        return pl.Trainer(
            strategy=STRATEGIES[self.kind](**options.pop("strategy", {})),
            accelerator="cpu",
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            max_epochs=epochs,
            callbacks=list(callbacks),
            default_root_dir=self.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )

    def save(self, model: pl.LightningModule, epochs: int = 1, **saving: Any) -> str:
        """Train, and return the path of the last checkpoint."""
        saves = ModelCheckpoint(self.folder, **{"save_last": True, "save_top_k": 0, **saving})
        self.trainer(epochs, saves).fit(model, batches())
        return saves.last_model_path

    def resume(
        self, model: Net, path: str | None, epochs: int = 2, **options: Any
    ) -> dict[int, str]:
        """Resume and train, and return the losses by step."""
        self.trainer(epochs, enable_checkpointing=False, **options).fit(
            model, batches(), ckpt_path=path
        )
        return model.losses


class Net(pl.LightningModule):
    """Two layers. Notes its losses by step."""

    def __init__(self, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
        self.losses: dict[int, str] = {}

    def configure_model(self) -> None:
        attached = self._trainer is not None
        if attached and isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.losses[self.trainer.global_step] = float(loss.detach()).hex()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val", self(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def batches(rows: int = 40, size: int = 4) -> torch.utils.data.DataLoader[torch.Tensor]:
    drawn = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(list(drawn), batch_size=size)


def row(function: Callable[[Use], Any]) -> Callable[[Use], Any]:
    """Add a row of the table."""
    ROWS[function.__name__] = function
    return function


def all_rows(folder: str, device: str) -> dict[str, list[Any]]:
    """The outcome of each row: with Lightning's own strategy, and with this package's."""
    warnings.simplefilter("ignore")
    found: dict[str, list[Any]] = {name: [] for name in ROWS}
    for kind in (f"own {device}", device):
        for name, function in ROWS.items():
            place = Path(folder, kind, name)
            try:
                outcome = function(Use(kind, place))
            except Exception:
                outcome = f"{FAILED}{traceback.format_exc()}"
            found[name].append(outcome)
    return found


def saved(folder: str, kind: str, model: str) -> str:
    """The path of a checkpoint, for ranks."""
    return Use(kind, Path(folder)).save(globals()[model]())


def resumed(
    folder: str, kind: str, model: str, options: dict[str, Any], path: str | None = None
) -> dict[int, str]:
    """The losses after a checkpoint, or of a whole training, for ranks."""
    warnings.simplefilter("ignore")
    return Use(kind, Path(folder)).resume(globals()[model](), path, strategy=options)


def refused(folder: str, kind: str, model: str, path: str) -> tuple[str, bool]:
    """The error of a resume, for ranks; and whether the weights are as the model notes them in ``made``."""
    made = globals()[model]()
    try:
        Use(kind, Path(folder)).resume(made, path)
    except IncompatibleStateError as error:
        return str(error), all(map(torch.equal, shards(made), made.made))
    return "", False


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank has of the weights."""
    return [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]


def weights(model: torch.nn.Module) -> list[float]:
    return [float(value.double().sum()) for value in model.parameters()]


# ---- compiled modules ----------------------------------------------------------------------------


class Compiled(Net):
    """Compiles a module of its own: the names of its values get another part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


@row
def a_module_compiled_in_init_resumes(use: Use) -> Any:
    return use.resume(Compiled(), use.save(Compiled()))


@row
def a_module_compiled_in_init_is_validated(use: Use) -> Any:
    path = use.save(Compiled())
    return use.trainer(1).validate(Compiled(), batches(4), ckpt_path=path, verbose=False)


# ---- the tuner -----------------------------------------------------------------------------------


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self) -> Any:
        return batches(80, self.batch_size)

    def val_dataloader(self) -> Any:
        return batches(8, self.batch_size)


def _tuned(use: Use, tune: Callable[[Tuner, Tuned], Any]) -> Any:
    model = Tuned()
    before = weights(model)
    trainer = use.trainer(1, enable_checkpointing=False)
    found = tune(Tuner(trainer), model)
    assert weights(model) == before
    model.losses.clear()
    trainer.fit(model)
    left = [each.name for each in use.folder.iterdir()] if use.folder.exists() else []
    return found, model.losses, left


@row
def the_batch_size_is_searched(use: Use) -> Any:
    if "ddp" in use.kind:
        return "Lightning refuses"
    return _tuned(use, lambda tuner, model: tuner.scale_batch_size(model, max_trials=2))


@row
def the_learning_rate_is_searched(use: Use) -> Any:
    return _tuned(use, lambda tuner, model: tuner.lr_find(model, num_training=9).suggestion())


# ---- what hooks do to a checkpoint --------------------------------------------------------------


class OtherHead(Net):
    """Has another number of outputs than the checkpoint, whose head it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.Linear(16, 3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, value in self.state_dict().items():
            if checkpoint["state_dict"][name].shape != value.shape:
                checkpoint["state_dict"][name] = value
        checkpoint["optimizer_states"] = []


@row
def a_hook_gives_the_model_another_head_and_drops_the_optimizer(use: Use) -> Any:
    return use.resume(OtherHead(), use.save(Net()))


class Renamed(Net):
    """Calls its layers otherwise than the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.net
        del self.net

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name.replace("net.", "body."): value for name, value in state}


@row
def a_hook_renames_and_the_optimizer_goes_on(use: Use) -> Any:
    return use.resume(Renamed(), use.save(Net()))


class OtherRate(Net):
    """Goes on at another learning rate, with half of the moments."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        for group in optimizer["param_groups"]:
            assert group["params"] == list(range(4))
            group["lr"] = 1.0
        for state in optimizer["state"].values():
            state["exp_avg"].mul_(0.5)


@row
def a_hook_changes_the_state_of_the_optimizer(use: Use) -> Any:
    return use.resume(OtherRate(), use.save(Net()))


class Longer(Net):
    """Calls its layers otherwise than the checkpoint, and has one more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.net
        self.more = torch.nn.Linear(2, 2).requires_grad_(False)
        del self.net

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch)


class AsStored(Net):
    """Is as wide as the checkpoint says."""

    def __init__(self) -> None:
        super().__init__(width=4)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        width = len(checkpoint["state_dict"]["net.0.weight"])
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))


@row
def a_hook_makes_the_modules_that_the_checkpoint_has(use: Use) -> Any:
    return use.resume(AsStored(), use.save(Net()))


class Extra(Net):
    """Saves further values of its own."""

    seen: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"table": torch.arange(3), "of": [1, {"two": (3, None)}]}
        checkpoint["mean"] = torch.tensor(0.5)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["mine"]["table"].tolist(), checkpoint["mine"]["of"]
        self.seen = *self.seen, float(checkpoint["mean"])


@row
def hooks_save_and_load_values_of_their_own(use: Use) -> Any:
    model = Extra()
    return use.resume(model, use.save(Extra())), model.seen


class OtherOnTheLast(Net):
    """Has another optimizer than the checkpoint, on the last rank only."""

    def configure_optimizers(self) -> Any:
        self.made = shards(self)
        if self.global_rank < self.trainer.world_size - 1:
            return super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class OneMore(Net):
    """Is not strict, and has an optimizer more than the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.made = shards(self)
        first, second = list(self.net[0].parameters()), list(self.net[1].parameters())
        return [torch.optim.AdamW(first), torch.optim.AdamW(second)]


class NotStrict(Net):
    """Has a head that the checkpoint lacks, and lacks another."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.strict_loading = False
        self.add_module(head, torch.nn.Linear(2, 2).requires_grad_(False))


@row
def a_model_that_is_not_strict_is_validated_with_what_there_is(use: Use) -> Any:
    path = use.save(NotStrict("old"))
    return use.trainer(1).validate(NotStrict("new"), batches(4), ckpt_path=path, verbose=False)


# ---- kinds of checkpoints ------------------------------------------------------------------------


@row
def weights_alone_are_saved(use: Use) -> Any:
    path = use.save(Net(), save_weights_only=True)
    found = use.trainer(1).validate(Net(width=16), batches(4), ckpt_path=path, verbose=False)
    try:
        use.resume(Net(), path)
    except KeyError as error:
        return found, str(error)


@row
def the_best_is_validated_tested_and_predicts(use: Use) -> Any:
    model = Net()
    saves = ModelCheckpoint(use.folder, monitor="val", save_top_k=2, filename="{epoch}")
    trainer = use.trainer(3, saves)
    trainer.fit(model, batches(), batches(8))
    model.test_step = model.validation_step
    model.predict_step = lambda batch, batch_idx: model(batch).tolist()
    return (
        trainer.validate(ckpt_path="best", dataloaders=batches(4), verbose=False),
        trainer.test(ckpt_path="best", dataloaders=batches(4), verbose=False),
        trainer.predict(model, batches(4), ckpt_path="best"),
        Path(saves.best_model_path).name,
        sorted(each.name for each in use.folder.iterdir()),
    )


class WithTable(Net):
    """Has parameters that no text can hold: keys that are numbers, and a tensor."""

    def __init__(self, table: Any, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


@row
def the_best_is_loaded_for_inference(use: Use) -> Any:
    saves = ModelCheckpoint(use.folder, monitor="val", save_top_k=1, filename="{epoch}")
    first = WithTable({0: "a", 1: ["b", {}]}, rate=0.2)
    use.trainer(2, saves).fit(first, batches(), batches(8))
    model = WithTable.load_from_checkpoint(saves.best_model_path, rate=0.3)
    path = Path(saves.best_model_path)
    other = WithTable.load_from_checkpoint(path, map_location=torch.device("cpu"))
    devices = {each.device.type for each in other.parameters()}
    return weights(model) == weights(first), dict(model.hparams), devices


@row
def early_stopping_goes_on_counting(use: Use) -> Any:
    def stopping() -> EarlyStopping:
        return EarlyStopping("val", patience=3, min_delta=10.0)

    first = use.trainer(2, stopping(), ModelCheckpoint(use.folder, save_last=True, save_top_k=0))
    first.fit(Net(), batches(), batches(8))
    second = use.trainer(9, stopping(), enable_checkpointing=False)
    second.fit(Net(), batches(), batches(8), ckpt_path=str(use.folder / "last.ckpt"))
    return second.current_epoch


@row
def a_checkpoint_from_within_an_epoch_resumes(use: Use) -> Any:
    saves = ModelCheckpoint(use.folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    use.trainer(1, saves).fit(Net(), batches())
    return use.resume(Net(), str(use.folder / "step=3.ckpt"), epochs=1)


@row
def a_checkpoint_that_was_saved_by_hand_is_loaded_right_away(use: Use) -> Any:
    trainer = use.trainer(1, enable_checkpointing=False)
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(use.folder / "mine.ckpt")
    return use.resume(Net(), str(use.folder / "mine.ckpt"))


class Modes(pl.LightningDataModule):
    """Counts how often it was asked for batches."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rows": 40})
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return batches()

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = 100 + state["asked"]


@row
def a_data_module_has_a_state(use: Use) -> Any:
    first = use.trainer(1, ModelCheckpoint(use.folder, save_last=True, save_top_k=0))
    first.fit(Net(), datamodule=Modes())
    data = Modes()
    second = use.trainer(2, enable_checkpointing=False)
    second.fit(Net(), datamodule=data, ckpt_path=str(use.folder / "last.ckpt"))
    return data.asked


class Adversaries(Net):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        made, judged = self.optimizers()
        for optimizer, loss in (
            (made, (self.judge(self.net(batch)) - 1).square().mean()),
            (judged, self.judge(self.net(batch).detach()).square().mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses[self.trainer.global_step] = float(loss.detach()).hex()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
        ]


@row
def two_optimizers_are_stepped_by_hand(use: Use) -> Any:
    settings = {"strategy": {"find_unused_parameters": True}} if "ddp" in use.kind else {}
    saves = ModelCheckpoint(use.folder, save_last=True, save_top_k=0)
    use.trainer(1, saves, **settings).fit(Adversaries(), batches())
    return use.resume(Adversaries(), str(use.folder / "last.ckpt"), **settings)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@row
def a_scheduler_is_left_out(use: Use) -> Any:
    return use.resume(Net(), use.save(Scheduled()))


@row
def a_scheduler_is_added(use: Use) -> Any:
    return use.resume(Scheduled(), use.save(Net()))


class TwoGroups(Net):
    """The last layer comes first, and learns more slowly."""

    def configure_optimizers(self) -> Any:
        first, last = (list(layer.parameters()) for layer in self.net)
        return torch.optim.AdamW([{"params": last, "lr": 1e-3}, {"params": first}], lr=1e-2)


@row
def two_groups_have_rates_of_their_own(use: Use) -> Any:
    return use.resume(TwoGroups(), use.save(TwoGroups()))


class WithLBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2)


@row
def lbfgs_resumes(use: Use) -> Any:
    return use.resume(WithLBFGS(), use.save(WithLBFGS()))


# ---- callbacks of Lightning ----------------------------------------------------------------------


class Thawing(BaseFinetuning):
    """Trains the first layer from the second epoch on: with a group of its own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=1e-3)


class TrainsSome(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda each: each.requires_grad, self.parameters()))


@row
def a_layer_is_thawed_and_the_job_resumes_after_it(use: Use) -> Any:
    if "ddp" in use.kind:
        return "DDP leaves layers that were frozen when it was made to each rank"
    first = use.trainer(2, Thawing(), ModelCheckpoint(use.folder, save_last=True, save_top_k=0))
    first.fit(TrainsSome(), batches())
    model = TrainsSome()
    second = use.trainer(3, Thawing(), enable_checkpointing=False)
    second.fit(model, batches(), ckpt_path=str(use.folder / "last.ckpt"))
    return model.losses, len(second.optimizers[0].param_groups)


class Ends(Callback):
    """Ends the second epoch with an error."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 13:
            raise InterruptedError("the job is over")


@row
def an_exception_leaves_a_checkpoint(use: Use) -> Any:
    saves = OnExceptionCheckpoint(use.folder)
    try:
        use.trainer(2, saves, Ends()).fit(Net(), batches())
    except InterruptedError:
        return use.resume(Net(), saves.ckpt_path)


@row
def weights_are_averaged_and_the_job_resumes(use: Use) -> Any:
    def average() -> WeightAveraging:
        return WeightAveraging()

    settings = {"strategy": {"reads": "blocking"}} if "own" not in use.kind else {}
    saves = ModelCheckpoint(use.folder, save_last=True, save_top_k=0)
    use.trainer(1, average(), saves, **settings).fit(Net(), batches())
    model = Net()
    second = use.trainer(2, average(), enable_checkpointing=False, **settings)
    second.fit(model, batches(), ckpt_path=str(use.folder / "last.ckpt"))
    return model.losses, weights(model)


@row
def gradients_are_accumulated_over_batches(use: Use) -> Any:
    saves = ModelCheckpoint(use.folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    use.trainer(1, saves, accumulate_grad_batches=3).fit(Net(), batches())
    model = Net()
    second = use.trainer(2, enable_checkpointing=False, accumulate_grad_batches=3)
    second.fit(model, batches(), ckpt_path=str(use.folder / "step=2.ckpt"))
    return model.losses


@row
def half_precision_resumes(use: Use) -> Any:
    saves = ModelCheckpoint(use.folder, save_last=True, save_top_k=0)
    use.trainer(1, saves, precision="bf16-true").fit(Net(), batches())
    model = Net()
    second = use.trainer(2, enable_checkpointing=False, precision="bf16-true")
    second.fit(model, batches(), ckpt_path=str(use.folder / "last.ckpt"))
    return model.losses


@row
def a_checkpoint_loads_into_another_precision(use: Use) -> Any:
    path = use.save(Net())
    model = Net()
    use.trainer(2, enable_checkpointing=False, precision="bf16-true").fit(
        model, batches(), ckpt_path=path
    )
    return model.losses
