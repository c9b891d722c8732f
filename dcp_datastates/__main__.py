"""``python -m dcp_datastates``: see :mod:`dcp_datastates_cli`."""

import sys

from dcp_datastates_cli.main import main

sys.exit(main())
