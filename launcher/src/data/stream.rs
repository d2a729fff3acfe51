//! Data that can be read only once: standard input and pipes. It is copied to a file, which the ranks and a resumed run read.

use crate::error::{ErrorCode, Failure};
use crate::lang::{both, text};
use models::data::{data_parts, weight_of};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What stands for standard input.
const STDIN: [&str; 2] = ["-", "/dev/stdin"];
/// Directories of a process's open files.
const OPEN_FILES: [&str; 2] = ["/dev/fd", "/proc/self/fd"];
/// Name of the directory with the copies, inside the cache directory.
const COPIES: &str = "streams";
/// Copies that nobody has used for so long are removed.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Bytes that are copied at a time.
const BLOCK_BYTES: usize = 1 << 16;

/// Replaces the streams that `data` names by copies below `cache`. Relative paths of images start at the current directory
/// then, unless `images` says another.
///
/// # Errors
/// A stream cannot be read or stored, standard input is a terminal (exit 3), or files and streams are given together
/// without `images` (exit 2).
pub(crate) fn store(
    data: &mut Option<PathBuf>,
    images: &mut Option<PathBuf>,
    cache: &Path,
) -> Result<(), Failure> {
    let Some(given) = data.as_deref().filter(|data| reads_stream(data)) else {
        return Ok(());
    };
    let mut parts = Vec::new();
    let mut all = true;
    for part in data_parts(given) {
        let part = match stream(&part) {
            Some((path, weight)) => format!("{}{weight}", copied(&path, cache)?.display()),
            None => {
                all = false;
                part.display().to_string()
            }
        };
        parts.push(part);
    }
    if images.is_none() && !all {
        return Err(Failure::usage(
            text!(
                "--data {} names files and a stream",
                "--data {} 同时包含文件和数据流",
                given.display()
            ),
            both(
                "a stream has no directory at which relative paths of images start",
                "数据流没有可作为图片相对路径起点的目录",
            ),
        )
        .next(both("give --image-dir", "请给出 --image-dir")));
    }
    images.get_or_insert_with(|| PathBuf::from("."));
    *data = Some(parts.join(",").into());
    Ok(())
}

/// Fails if `data` names a stream, which each of several ranks would read.
///
/// # Errors
/// It does (exit 2).
pub(crate) fn refuse(data: Option<&Path>) -> Result<(), Failure> {
    match data.filter(|data| reads_stream(data)) {
        None => Ok(()),
        Some(data) => Err(Failure::usage(
            text!(
                "--data {} is a stream",
                "--data {} 是数据流",
                data.display()
            ),
            both(
                "another launcher started the ranks, and each of them would read it",
                "进程由其他启动器启动，每个进程都会读取它",
            ),
        )
        .next(both("store it in a file", "请先存为文件"))),
    }
}

fn reads_stream(data: &Path) -> bool {
    data_parts(data).iter().any(|part| stream(part).is_some())
}

/// The stream that `part` names and what follows it as its weight.
fn stream(part: &Path) -> Option<(PathBuf, String)> {
    let path = weight_of(part).map_or_else(|_| part.to_owned(), |(path, _)| path);
    let weight = part
        .to_string_lossy()
        .strip_prefix(&*path.to_string_lossy())?
        .to_owned();
    let open = path
        .parent()
        .is_some_and(|parent| OPEN_FILES.iter().any(|of| parent == Path::new(of)));
    let is_stream = || {
        let kind = fs::metadata(&path).ok()?.file_type();
        Some(kind.is_fifo() || kind.is_char_device() || kind.is_socket())
    };
    let named = STDIN.iter().any(|name| path == Path::new(name));
    (named || open || is_stream() == Some(true)).then_some((path, weight))
}

/// Ending of a file's name that says what is in the file `path`: the first line of a CSV file names columns.
fn ending_of(path: &Path) -> &'static str {
    let mut start = Vec::new();
    let read = File::open(path).map(|file| file.take(BLOCK_BYTES as u64).read_to_end(&mut start));
    let start = read.map_or(String::new().into(), |_| String::from_utf8_lossy(&start));
    let text = start.trim_start_matches('\u{feff}').trim_start();
    let first = text.lines().next().unwrap_or_default();
    match !first.starts_with(['{', '[']) && first.contains(',') {
        true => "csv",
        false => "json",
    }
}

/// Removes copies that nobody has written or read for a while. One that cannot be removed stays.
fn remove_old(directory: &Path) {
    let old = |entry: &fs::DirEntry| {
        let file = entry.metadata().ok()?;
        let used = [file.modified().ok(), file.accessed().ok()];
        let age = used.into_iter().flatten().max()?.elapsed().ok()?;
        Some(age > KEPT)
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if old(&entry) == Some(true) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// The file below `cache` with the content of the stream `path`, named by its content.
fn copied(path: &Path, cache: &Path) -> Result<PathBuf, Failure> {
    let is_stdin = STDIN.iter().any(|name| path == Path::new(name));
    if is_stdin && io::stdin().is_terminal() {
        return Err(Failure::new(
            ErrorCode::DataFile,
            both("standard input is a terminal", "标准输入是终端"),
            both("no data comes from it", "它不提供数据"),
        )
        .next(both(
            "send a file to it, or give the file's path",
            "请将文件重定向到标准输入，或给出文件路径",
        )));
    }
    let directory = cache.join(COPIES);
    let disk =
        |error: io::Error| Failure::io(ErrorCode::Disk, both("write", "写入"), &directory, &error);
    let unread =
        |error: io::Error| Failure::io(ErrorCode::DataFile, both("read", "读取"), path, &error);
    fs::create_dir_all(&directory).map_err(disk)?;
    remove_old(&directory);
    let mut input: Box<dyn Read> = match is_stdin {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path).map_err(unread)?),
    };
    let started = directory.join(format!(".{}", std::process::id()));
    let mut output = File::create(&started).map_err(disk)?;
    let (mut hasher, mut block) = (blake3::Hasher::new(), vec![0; BLOCK_BYTES]);
    loop {
        let read = match input.read(&mut block) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(unread)?,
        };
        if read == 0 {
            break;
        }
        hasher.update(&block[..read]);
        output.write_all(&block[..read]).map_err(disk)?;
    }
    output.sync_all().map_err(disk)?;
    let ending = path.extension().and_then(|ending| ending.to_str());
    let ending = ending.unwrap_or(ending_of(&started));
    let stored = directory.join(format!("{}.{ending}", hasher.finalize().to_hex()));
    fs::rename(&started, &stored).map_err(disk)?;
    Ok(stored)
}
