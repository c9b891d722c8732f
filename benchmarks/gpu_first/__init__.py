"""The first half hour on a GPU: facts, bare hardware, tests, latencies and saves (``make gpu-first``)."""
