"""``python -m paradyse`` is the command ``paradyse``."""

import sys

from paradyse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
