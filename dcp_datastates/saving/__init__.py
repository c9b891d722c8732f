"""One save, from the call to its outcome. (Not "save": that is a function of the package.)"""
