"""What this package has to know of how DCP works inside: its threads, its futures, its process group."""

import torch

from dcp_datastates.dcp.tested import tell_if_untested

tell_if_untested(torch.__version__)
