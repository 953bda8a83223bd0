"""``python -m ringplug.launch`` is ``ringrun``."""

from __future__ import annotations

import sys

from ringplug.launch import main

if __name__ == "__main__":
    sys.exit(main())
