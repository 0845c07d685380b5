"""What ``setup.cfg`` cannot say: links of the README lead to the repository from wherever the text is shown."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

config = ConfigParser()
config.read("setup.cfg", encoding="utf-8")
home = config["metadata"]["url"]
text = Path("README.md").read_text(encoding="utf-8")
text = re.sub(r"(!\[[^]]*\]\(|<img [^>]*src=\")(?!\w+:)", rf"\1{home}/raw/main/", text)
setup(long_description=re.sub(r"(?<!!)(\[[^]]+\]\()(?!\w+:|#)", rf"\1{home}/blob/main/", text))
