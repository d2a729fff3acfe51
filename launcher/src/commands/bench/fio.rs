//! Measures a disk with fio: direct requests of 1 MiB, 16 in flight.

use crate::lang::{Text, both};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::{ErrorCode, Failure};

/// Whether the program `fio` (flexible I/O tester) is in `PATH` and answers `fio --version`.
pub(super) fn is_installed() -> bool {
    let status = Command::new("fio")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// Writes and reads `bytes` bytes in `directory`. Returns the rates of reading and writing in bytes per second.
pub(super) fn run(directory: &Path, bytes: u64) -> Result<(f64, f64), Failure> {
    let file = directory.join("fio");
    let pass = |kind: &str| -> Result<f64, Failure> {
        let output = Command::new("fio")
            .arg("--name=bench")
            .arg(format!("--filename={}", file.display()))
            .arg(format!("--rw={kind}"))
            .arg(format!("--size={bytes}"))
            .args(["--bs=1m", "--direct=1", "--ioengine=libaio", "--iodepth=16"])
            .arg("--output-format=json")
            .output()
            .map_err(|e| {
                Failure::io(
                    ErrorCode::Disk,
                    both("run fio in", "运行 fio 于"),
                    directory,
                    &e,
                )
            })?;
        rate(&output.stdout, kind).ok_or_else(|| {
            let text = String::from_utf8_lossy(&output.stderr);
            let why = text.lines().next().map_or_else(
                || both("its output has no rate", "其输出中没有速率").into(),
                Text::literal,
            );
            Failure::new(
                ErrorCode::Disk,
                both("fio gave no measurement", "fio 没有给出测量结果"),
                why,
            )
            .next(both(
                "remove fio from PATH to measure only the methods of this program",
                "请从 PATH 中去掉 fio，只测量本程序的方法",
            ))
        })
    };
    // Written twice, as with the engine's own files: the second time, the file system has allocated all blocks.
    pass("write")?;
    let write = pass("write")?;
    let read = pass("read");
    std::fs::remove_file(&file).ok();
    Ok((read?, write))
}

/// Bandwidth in bytes per second in fio's JSON report, for `kind` `read` or `write`. `None` if it is absent or zero.
fn rate(report: &[u8], kind: &str) -> Option<f64> {
    let report: Value = serde_json::from_slice(report).ok()?;
    let rate = report["jobs"][0][kind]["bw_bytes"].as_f64()?;
    (rate > 0.0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_read_from_the_report_of_fio() {
        let report = br#"{"jobs":[{"read":{"bw_bytes":2500000},"write":{"bw_bytes":0}}]}"#;
        assert_eq!(rate(report, "read"), Some(2.5e6));
        assert_eq!(rate(report, "write"), None);
        assert_eq!(rate(b"fio: no libaio", "read"), None);
    }
}
