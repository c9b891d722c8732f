"""The command line ``dcp-datastates``; ``python -m dcp_datastates`` is the same.

It is a package beside ``dcp_datastates``, because importing that registers the step hook, for which it imports torch:
seconds. :mod:`dcp_datastates_cli.main` reads the arguments first, so ``--help``, ``--version`` and usage
errors answer immediately.

Results go to the standard output; errors, warnings, questions and the progress bar to the standard error. ``--help`` of
each command says what its exit status means; 130 is an interrupt. Where ``verify`` meets both damage and a checkpoint
that it cannot read, the status is 1.

``--json`` prints one JSON document; docs/operate.md has their fields.
"""
