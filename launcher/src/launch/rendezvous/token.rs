//! The job's token, a secret of its ranks.

use crate::lang::{Text, both, text};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use engine::comm::tcp::{MIN_SECRET_BYTES, Secret};

use crate::error::{ErrorCode, Failure};
use crate::rank_env::{TOKEN, TOKEN_FILE, Token};

/// Maximal length of a token in bytes.
const MAX_BYTES: u64 = 4096;

/// The secret from the token in the environment, or in the file that it names.
pub(super) fn secret(token: &Token) -> Result<Secret, Failure> {
    let (text, from) = match (&token.text, &token.file) {
        (Some(_), Some(file)) => {
            return Err(refused(
                text!(
                    "{TOKEN} and {TOKEN_FILE}={} are both set",
                    "同时设置了 {TOKEN} 和 {TOKEN_FILE}={}",
                    file.display()
                ),
                both(
                    "the ranks of several machines use one token",
                    "多台机器上的 rank 使用同一个令牌",
                ),
            )
            .next(both("unset one of them", "请取消设置其中一个")));
        }
        (Some(text), None) => (text.as_bytes().to_vec(), TOKEN.to_string()),
        (None, Some(file)) => (read(file)?, file.display().to_string()),
        (None, None) => {
            return Err(refused(
                both("the ranks of several machines have no token", "多台机器上的 rank 没有令牌"),
                both("only processes that know it can join; the token itself is never sent", "只有知道令牌的进程才能加入；令牌本身从不发送"),
            )
            .next(text!("{TOKEN}=$(head -c 24 /dev/urandom | base64), the same on every machine; srun and mpirun -x {TOKEN} pass it on", "{TOKEN}=$(head -c 24 /dev/urandom | base64)，在每台机器上相同；srun 和 mpirun -x {TOKEN} 会传递它"
            ))
            .next(text!("or {TOKEN_FILE}, a file that only its owner can read", "或使用 {TOKEN_FILE}，即只有所有者可读的文件")));
        }
    };
    let trimmed = text.trim_ascii();
    Secret::new(trimmed).ok_or_else(|| {
        refused(
            text!(
                "the token of {from} has {} bytes",
                "{from} 的令牌只有 {} 字节",
                trimmed.len()
            ),
            both("a short token can be guessed", "过短的令牌可能被猜中"),
        )
        .next(text!(
            "at least {MIN_SECRET_BYTES} bytes: head -c 24 /dev/urandom | base64",
            "至少 {MIN_SECRET_BYTES} 字节：head -c 24 /dev/urandom | base64"
        ))
    })
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: std::io::Error| {
        Failure::io(ErrorCode::Rendezvous, both("read", "读取"), path, &error)
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0 {
        return Err(refused(
            text!(
                "{} can be read by everybody",
                "所有人都可以读取 {}",
                path.display()
            ),
            both(
                "everybody who knows the token can join the run",
                "任何知道令牌的人都可以加入运行",
            ),
        )
        .evidence(text!("mode {:04o}", "权限 {:04o}", mode & 0o7777))
        .next(Text::literal(format_args!("chmod 600 {}", path.display()))));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES)
        .read_to_end(&mut text)
        .map_err(failed)?;
    Ok(text)
}

fn refused(title: impl Into<Text>, cause: impl Into<Text>) -> Failure {
    Failure::new(ErrorCode::Rendezvous, title, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_long_and_files_are_private() {
        let directory = tempfile::tempdir().expect("temp dir");
        let file = directory.path().join("token");
        let with = |text: Option<&str>, file: Option<&Path>| {
            secret(&Token {
                text: text.map(str::to_owned),
                file: file.map(Path::to_path_buf),
            })
        };
        let refused = |result: Result<Secret, Failure>, words: &str| {
            let failure = result.expect_err(words);
            assert_eq!(failure.code.status(), 13);
            assert!(failure.title.contains(words), "{failure}");
            assert!(!failure.to_string().contains("0123456789"), "{failure}");
        };
        with(Some("0123456789abcdef"), None).expect("long enough");
        refused(with(None, None), "have no token");
        refused(with(Some(" 0123456789abcde\n"), None), "has 15 bytes");
        refused(with(None, Some(&file)), "cannot read");
        std::fs::write(&file, "0123456789abcdef\n").expect("written");
        let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode));
        mode(0o644).expect("set");
        refused(with(None, Some(&file)), "can be read by everybody");
        mode(0o600).expect("set");
        with(None, Some(&file)).expect("private");
        refused(with(Some("0123456789abcdef"), Some(&file)), "are both set");
    }
}
