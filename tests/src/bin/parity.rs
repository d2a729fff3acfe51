//! `parity PACK_DIR...`: compares golden packs with what this project computes.
//!
//! One line per stored quantity: name, largest difference, tolerance, ok or FAIL. Exit status 1
//! when anything differs, 2 when a pack cannot be read.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is a command"
)]

use std::path::PathBuf;
use std::process::ExitCode;
use tests::parity::{check_pack, count, margins};

fn main() -> ExitCode {
    let dirs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if dirs.is_empty() {
        eprintln!("usage: parity PACK_DIR...");
        return ExitCode::from(2);
    }
    let (mut compared, mut failed, mut unreadable) = (0, 0, 0);
    for dir in &dirs {
        match check_pack(dir) {
            Ok(sections) => {
                for (title, comparisons) in &sections {
                    for comparison in comparisons {
                        println!("{}: {title}: {comparison}", dir.display());
                    }
                }
                let (all, bad) = count(&sections);
                for (kind, share) in margins(&sections) {
                    println!(
                        "{}: margin: {kind} used {:.0} % of its tolerance",
                        dir.display(),
                        share * 100.0
                    );
                }
                println!("{}: {} of {all} quantities agree", dir.display(), all - bad);
                compared += all;
                failed += bad;
            }
            Err(error) => {
                eprintln!("{}: cannot be read: {error:#}", dir.display());
                unreadable += 1;
            }
        }
    }
    println!(
        "parity: {} passed, {failed} failed, {unreadable} packs unreadable",
        compared - failed
    );
    match (failed, unreadable) {
        (_, 1..) => ExitCode::from(2),
        (1.., 0) => ExitCode::from(1),
        _ => ExitCode::SUCCESS,
    }
}
