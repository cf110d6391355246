"""The one door to files: `read` opens them, `write` replaces them so that neither a crash nor a link can spoil them,
`sums` checks them, and `disk` says why a disk refused."""

from gptworks.files.disk import naming_disk_errors, why_not_written
from gptworks.files.read import check_regular, read_regular, read_text
from gptworks.files.sums import SUMS_FILE, check_sums, sealed_json, sha256_file, unsealed_json, write_sums
from gptworks.files.write import (
    check_free,
    link_or_copy,
    make_folder,
    new_folder,
    remove_leftovers,
    remove_tree,
    replacing,
    replacing_by_name,
    sync,
    write_whole,
)

__all__ = [
    "SUMS_FILE",
    "check_free",
    "check_regular",
    "check_sums",
    "link_or_copy",
    "make_folder",
    "naming_disk_errors",
    "new_folder",
    "read_regular",
    "read_text",
    "remove_leftovers",
    "remove_tree",
    "replacing",
    "replacing_by_name",
    "sealed_json",
    "sha256_file",
    "sync",
    "unsealed_json",
    "why_not_written",
    "write_sums",
    "write_whole",
]
