"""What the tests share: ranks to run on, states to save, and independent eyes to check with."""
