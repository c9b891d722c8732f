"""Planning: plans in columns, the shares that each rank writes, and the metadata of the checkpoint."""
