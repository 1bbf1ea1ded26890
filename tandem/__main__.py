"""`python -m tandem` is the command `tandem`."""

import sys

from tandem.cli import main

sys.exit(main())
