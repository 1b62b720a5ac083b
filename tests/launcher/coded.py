"""The command line that leaves its exit code in a file: python -m tests.launcher.coded DIRECTORY train ..."""

import os
import sys
from pathlib import Path

from launcher.__main__ import main

if __name__ == "__main__":
    directory, *arguments = sys.argv[1:]
    code = main(arguments)
    Path(directory, f"code-{os.environ.get('RANK', '0')}").write_text(str(code))
    sys.exit(code)
