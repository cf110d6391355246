"""All access to files: `read` opens them, `write` replaces them so that neither a crash nor a link damages them,
`sums` verifies checksums, `fetch` downloads, `remote` and `mirror` read and write object stores, and `disk` explains
disk errors."""

from gptworks.files.disk import naming_disk_errors, why_not_written
from gptworks.files.lock import file_lock, is_locked
from gptworks.files.mirror import fetch_missing, fetched_path, local_path, send
from gptworks.files.read import (
    Stamp,
    check_inside,
    check_links,
    check_regular,
    check_tree,
    map_array,
    open_given,
    open_regular,
    path_like,
    read_array,
    read_given,
    read_regular,
    read_text,
    stamp,
)
from gptworks.files.remote import mirror_of, shown, url_of
from gptworks.files.schemes import is_url
from gptworks.files.sums import SUMS_FILE, check_sums, sealed_json, sha256_file, unsealed_json, write_sums
from gptworks.files.write import (
    check_free,
    copy_file,
    copy_folder,
    link_or_copy,
    make_folder,
    new_folder,
    open_new,
    open_to_append,
    open_to_change,
    remove_leftovers,
    remove_tree,
    replacing,
    replacing_by_name,
    sync,
    write_at,
    write_whole,
)
