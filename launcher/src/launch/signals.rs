//! Signals that stop a run after it has saved.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// Stop signals that this process handles: SIGINT, SIGTERM, SIGHUP and SIGUSR1, except those that its parent told it to
/// ignore. `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT of its background jobs.
pub(crate) fn handled() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    [SIGINT, SIGTERM, SIGHUP, SIGUSR1]
        .into_iter()
        .filter(|signal| ignored >> (signal - 1) & 1 == 0)
        .collect()
}

/// Ignored signals according to `/proc/self/status`; bit `n - 1` is signal `n`. 0 if the text does not tell.
fn ignored(status: &str) -> u64 {
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let status = "Name:\tlauncher\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored(status), 1 << (SIGHUP - 1) | 1 << 12);
        assert_eq!(ignored("Name:\tlauncher"), 0);
        assert!(handled().contains(&SIGTERM));
    }
}
