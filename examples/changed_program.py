"""A program changes: it gets a layer more, renames a layer, replaces the head. It goes on from its old checkpoints.

python changed_program.py
"""

import torch

import dcp_datastates as ds


def program(**layers):
    model = torch.nn.ModuleDict(layers)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "history": {}}


def linear(outputs=8):
    return torch.nn.Linear(8, outputs)


old = program(body=linear(), head=linear())
old["history"]["step 0"] = 0.5
with ds.CheckpointManager("ckpt", every=1) as manager:
    manager.save(0, old)

    # The history is filled with all that was saved of it.
    same = program(body=linear(), head=linear())
    manager.restore_latest(same)
    assert same["history"] == {"step 0": 0.5}

    # A new layer stays as the program made it, with fresh moments.
    deeper = program(body=linear(), middle=linear(), head=linear())
    try:
        manager.restore_latest(deeper)
    except ds.errors.IncompatibleStateError as error:
        print(error.missing)  # model.middle.weight and the other new names
    manager.restore_latest(deeper, missing="warn")
    assert torch.equal(deeper["model"]["body"].weight, old["model"]["body"].weight)

    # A renamed layer: from old names to new ones.
    renamed = program(trunk=linear(), head=linear())
    manager.restore_latest(renamed, rename={"model.body.": "model.trunk."})
    assert torch.equal(renamed["model"]["trunk"].weight, old["model"]["body"].weight)

    # A head of another shape, and its moments, stay as the program made them.
    wider = program(body=linear(), head=linear(outputs=16))
    manager.restore_latest(wider, exclude=["model.head", "optimizer.state.head.*"])
    assert torch.equal(wider["model"]["body"].weight, old["model"]["body"].weight)
print("restored", manager.latest_step)
