"""The schemes of URLs, and the URLs of object stores that may be given in place of a path."""

import os
import re

PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure"), "memory": ("fsspec", "s3")}
"""The package that implements each scheme of a store, and the extra that installs it. memory: this process's memory,
for tests."""
SCHEMES = {*PACKAGES, "http", "https"}
STORE_URL = re.compile(rf"({'|'.join(PACKAGES)}):/{{1,2}}([^/].*)", re.DOTALL)  # a Path has lost the second slash


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a folder or file in an object store."""
    return STORE_URL.fullmatch(str(path)) is not None
