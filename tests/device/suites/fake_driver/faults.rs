//! Mistakes and failures: each is caught or named.

use crate::site::{Ended, Site, TWO_UPDATES, says};

/// Two updates on one GPU, with the states in host memory.
const LINE: &str = "--device cuda --nproc 1 --offload cpu";

/// Trains with a fault, which must happen. Returns exit code and output.
fn faulty(site: &Site, fault: &str, eager: &str, line: &str) -> Ended {
    let variables = [("TESSERA_FAKE_FAULT", fault), ("TESSERA_FAKE_EAGER", eager)];
    let (code, text) = site.try_train(&variables, &format!("{line} --output {}", output(fault)));
    says(&text, &[&format!("fake driver: fault {fault}")]);
    (code, text)
}

/// Output directory of a run with a fault.
fn output(fault: &str) -> String {
    fault.replace([':', '+'], "-")
}

/// A missing wait, a late copy or a wrong parameter of the layer that calls the driver does not stay hidden: the run
/// ends, or its losses are others.
pub(crate) fn seeded_mistakes_are_caught() {
    let site = Site::with_model();
    let line = format!("{LINE} {TWO_UPDATES}");
    site.train(&[], &format!("{line} --output clean"));
    for (fault, eager) in [
        ("wait0:1+", "1"),
        ("late:1+", "0"),
        ("synchronization:2", "0"),
        ("argument:30", "0"),
        ("bind:1+", "0"),
    ] {
        is_caught(&site, fault, eager, &line, "clean");
    }
    // Ranks that read each other's memory also use the streams of copies in and of communication without the host.
    let two = format!("--device cuda --nproc 2 --offload cpu --collectives ipc {TWO_UPDATES}");
    site.train(&[], &format!("{two} --output two"));
    for (fault, eager) in [("wait1:1+", "2"), ("wait3:1+", "8")] {
        is_caught(&site, fault, eager, &two, "two");
    }
}

fn is_caught(site: &Site, fault: &str, eager: &str, line: &str, clean: &str) {
    let (code, text) = faulty(site, fault, eager, line);
    let differs = || site.losses(&output(fault)) != site.losses(clean);
    assert!(code != Some(0) || differs(), "{fault}: {text}");
}

/// Failures that a driver may report are named, and a refused capture costs only the graph.
pub(crate) fn failures_of_the_driver_are_named() {
    let site = Site::with_model();
    let line = format!("{LINE} {TWO_UPDATES}");
    for (fault, code, words) in [
        ("pinned:1", 11, "pinning 8388608 bytes"),
        ("launch:20", 13, "CUDA_ERROR_LAUNCH_FAILED"),
    ] {
        let (ended, text) = faulty(&site, fault, "0", &line);
        assert_eq!(ended, Some(code), "{fault}: {text}");
        says(&text, &[words]);
    }
    // Graphs begin with the third update.
    let line = format!("{LINE} --max-steps 4 --save-strategy no --eval-strategy no");
    let (code, text) = faulty(&site, "capture:1", "0", &line);
    assert_eq!(code, Some(0), "{text}");
}
