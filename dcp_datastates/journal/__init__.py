"""The journal of a loop: what it held at each step, to compare a resumed run with, and a model that is not trained."""
