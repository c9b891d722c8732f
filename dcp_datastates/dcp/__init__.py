"""The interface to DCP: all code that DCP calls, or that depends on DCP's threads, futures and process group."""

import torch

from dcp_datastates.dcp.tested import tell_if_untested

tell_if_untested(torch.__version__)
