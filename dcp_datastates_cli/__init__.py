"""The command line ``dcp-datastates``; ``python -m dcp_datastates`` is the same.

It is a package beside ``dcp_datastates``, because importing that registers the step hook, for which it imports torch:
seconds. :mod:`dcp_datastates_cli.main` reads the arguments first, so ``--help``, ``--version`` and usage
errors answer immediately.

Results go to the standard output; errors, warnings, questions and the progress bar to the standard error. ``--help`` of
each command says what its exit status means; 130 is an interrupt. Where ``verify`` meets both damage and a checkpoint
that it cannot read, the status is 1.

``--json`` prints one JSON document. Sizes are bytes, times are seconds (of dates: since the epoch); what is not
known is null. Fields may be added, and keep their names.

``verify --json`` of a checkpoint::

    kind: "checkpoint", path, whole, attempt, files, nbytes, tensors, objects, seconds    files …: how many
    damages: [{file, offset, nbytes, problem, tensors: [name]}]           file: relative to path

``verify --json`` of a directory of checkpoints::

    kind: "directory", path, whole
    checkpoints: [as above]
    unchecked: [{path, problem}]                                          stock DCP's, and what cannot be read

``inspect --json`` of a checkpoint (tensors and objects are null without ``--tensors``)::

    kind: "checkpoint", path, committed, attempt, committed_at, nbytes, ranks, tensor_count, object_count
    files: [{path, rank, nbytes, found_nbytes}]                           path: relative to the checkpoint
    dtypes: [{dtype, tensors, nbytes}]
    tensors: [{name, shape, dtype, nbytes, chunks}]
    objects: [{name, nbytes}]
    uncommitted: [{attempt, state, files, nbytes, written_at}]            state: undecided, withdrawn, replaced, deleted
    metrics: {name: number}, pins: [name]

``inspect --json`` of a directory of checkpoints::

    kind: "directory", path, latest, next_commit, free_nbytes, free_saves
    checkpoints: [{name, step, format, committed, attempt, nbytes, ranks, committed_at, problem, unjudged,
                   metrics, pins, in_flight, written_at}]                 in_flight: or abandoned
    failure: {at, by, error, checkpoint, attempt}, failure_is_past        past: a later save is committed
    retention: {at, by, error, rules: {prefix, last, every, best, within}}, deletes_next: [name]

``doctor --json``::

    root, saves_work, seconds
    operations: [{operation, works, needed, cause, meaning}]              cause, meaning: null if it works

``trace --json`` is a trace in Chrome's format::

    traceEvents: [{ph, pid, tid, name, ts, dur, args}]                    pid: the rank; ts, dur: microseconds
    otherData: path, attempt, began_at                                    began_at: of ts 0

The others (of paths: absolute)::

    convert --json   path, source_format, target_format, files, tensors, objects, nbytes, skipped: [name], seconds
    diff --json      a, b, same, tensors, objects, nbytes, seconds        tensors, objects: how many were compared
                     differences: [{name, problem, a, b, elements, differing, largest, relative, nans}]
                     largest, relative: a number, null or "inf"

    latest --json    root, latest, step                                   latest: a path, or null
                     tiers, places (if there are several ROOTs)           places: of the same checkpoint, nearest first
    retain --json    root, dry_run, kept: [path], deleted: [path]         newest first
    rm --json        dry_run, deleted: [path], failed: [{path, problem}]
"""
