"""One report of what saving and loading cost, beside other programs and the raw disk (``make bench``)."""
