"""What the launcher's tests launch."""

import argparse
import json
import os
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--say")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.say == "fail":
        raise RuntimeError("the worker fails on purpose")
    if os.environ["RANK"] == "0":
        options.out.write_text(
            json.dumps(
                {
                    "said": options.say,
                    "world": os.environ["WORLD_SIZE"],
                    "environment": os.environ.get("LAUNCHED_WITH", ""),
                }
            )
        )
