"""Reading later: which tensors may be, when they are, and who notices that one changed too soon."""
