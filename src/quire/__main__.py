"""`python -m quire` is `quire`."""

import os
import sys


def leave_current_folder() -> None:
    """Takes the current folder, which `python -m` puts first, from the search path for modules.

    It may be a downloaded model. Where it is the folder that holds Quire itself, processes that
    this one starts look there too.
    """
    folder = sys.path.pop(0)
    if folder == os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, others] if others else [folder])


if __name__ == "__main__":
    if not sys.flags.safe_path:
        leave_current_folder()
    from quire.cli.main import main

    main()
