"""The interface to DCP: all code that DCP calls, or that depends on DCP's threads, futures and process group."""

import torch

from dcp_datastates.dcp.tested import tell_if_untested, tell_of_new_fields

tell_if_untested(torch.__version__)
tell_of_new_fields(torch.__version__)
