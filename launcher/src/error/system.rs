//! Next steps for errors of the operating system, by their number.

use crate::lang::{Both, both};
use std::error::Error;
use std::io;

/// The next step after `error` or one of its sources, if the operating system refused something that the user can grant.
pub(crate) fn system_remedy(error: &(dyn Error + 'static)) -> Option<Both> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(remedy) = error.downcast_ref().and_then(remedy) {
            return Some(remedy);
        }
        next = error.source();
    }
    None
}

/// The next step after `error`.
pub(crate) fn remedy(error: &io::Error) -> Option<Both> {
    Some(match error.raw_os_error()? {
        1 | 13 => both(
            "grant this user the permission (ls -l shows the owner; chmod u+r FILE, chmod u+rx DIRECTORY), or run as the owner; downloading again does not help",
            "请为当前用户授予权限（ls -l 可查看所有者；chmod u+r FILE，chmod u+rx DIRECTORY），或以所有者身份运行；重新下载没有用",
        ),
        23 => both(
            "the machine has too many open files: end other programs, or raise fs.file-max",
            "机器上打开的文件过多：请结束其他程序，或提高 fs.file-max",
        ),
        24 => both(
            "this process has too many open files: raise the limit with ulimit -n 65536 (Docker: --ulimit nofile=65536), then start again",
            "本进程打开的文件过多：请用 ulimit -n 65536 提高上限（Docker：--ulimit nofile=65536），然后重新启动",
        ),
        27 => both(
            "the limit of the size of files is too low: ulimit -f unlimited, then start again",
            "文件大小上限过低：请执行 ulimit -f unlimited，然后重新启动",
        ),
        30 => both(
            "the file system is mounted read-only: mount it writable, or use another directory",
            "文件系统以只读方式挂载：请以可写方式挂载，或换一个目录",
        ),
        5 => both(
            "the disk or network file system failed: see dmesg, then copy the files to another disk",
            "磁盘或网络文件系统出错：请查看 dmesg，然后把文件复制到另一块磁盘",
        ),
        40 => both(
            "a symbolic link points to itself: copy the file that it should point to",
            "符号链接指向自身：请复制它本应指向的文件",
        ),
        116 => both(
            "the network file system lost the file: mount it again, then start again",
            "网络文件系统丢失了该文件：请重新挂载，然后重新启动",
        ),
        _ => return None,
    })
}
