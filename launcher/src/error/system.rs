//! Next steps for errors of the operating system, by their number.

use std::error::Error;
use std::io;

/// The next step after `error` or one of its sources, if the operating system refused something that the user can grant.
pub(crate) fn system_remedy(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(remedy) = error.downcast_ref().and_then(remedy) {
            return Some(remedy.to_owned());
        }
        next = error.source();
    }
    None
}

/// The next step after `error`.
pub(crate) fn remedy(error: &io::Error) -> Option<&'static str> {
    Some(match error.raw_os_error()? {
        1 | 13 => {
            "grant this user the permission (ls -l shows the owner; chmod u+r FILE, chmod u+rx DIRECTORY), or run as the owner; downloading again does not help"
        }
        23 => "the machine has too many open files: end other programs, or raise fs.file-max",
        24 => {
            "this process has too many open files: raise the limit with ulimit -n 65536 (Docker: --ulimit nofile=65536), then start again"
        }
        27 => "the limit of the size of files is too low: ulimit -f unlimited, then start again",
        30 => "the file system is mounted read-only: mount it writable, or use another directory",
        5 => {
            "the disk or network file system failed: see dmesg, then copy the files to another disk"
        }
        40 => "a symbolic link points to itself: copy the file that it should point to",
        116 => "the network file system lost the file: mount it again, then start again",
        _ => return None,
    })
}
