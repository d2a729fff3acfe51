//! Kernels compiled by a stand-in for NVRTC.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use device_tests::fake_driver;

use crate::site::{Site, driver};

/// Directory of the compiler, built once, beside that of the driver: other tests do not find it.
fn compiler() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let directory = driver().with_file_name("fake-compiler");
        fake_driver::build_compiler(&directory).unwrap();
        directory
    })
}

/// A module that a process compiled, and when, in seconds.
#[derive(Debug)]
struct Compiled {
    module: String,
    process: u32,
    begun: f64,
    ended: f64,
}

/// What a run on an empty or a filled cache compiles: before and after the first launch of a kernel.
fn compiled(site: &Site, output: &str, line: &str) -> [Vec<Compiled>; 2] {
    let log = site.path(output).with_extension("log");
    let libraries = format!("{}:{}", driver().display(), compiler().display());
    let own = [
        ("TESSERA_FAKE_LOG", log.to_str().unwrap()),
        ("TESSERA_CUDA_LIBS", &libraries),
        ("TESSERA_CUDA_ARCH", "native"),
    ];
    site.train(&own, &format!("{line} --output {output}"));
    let log = fs::read_to_string(log).unwrap();
    let (before, after) = log.split_once("launched").unwrap();
    [before, after].map(|part| {
        let lines = part
            .lines()
            .filter_map(|line| line.strip_prefix("compiled "));
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let mut word = || words.next().unwrap();
            Compiled {
                module: word().to_owned(),
                process: word().parse().unwrap(),
                begun: word().parse().unwrap(),
                ended: word().parse().unwrap(),
            }
        };
        lines.map(parse).collect()
    })
}

/// Two ranks compile every kernel of their run once, both take part, several at a time, and before either launches one. The
/// next run compiles none.
pub(crate) fn the_kernels_of_a_run_are_compiled_once_on_a_machine_before_the_first_launch() {
    let site = Site::with_model();
    let line = "--device cuda --nproc 2 --precision bf16 --lora-rank 8 --max-steps 2 --save-strategy no --eval-data held_out.json";
    let [before, after] = compiled(&site, "first", line);
    let late: Vec<&String> = after.iter().map(|one| &one.module).collect();
    assert!(late.is_empty(), "compiled after a launch: {late:?}");
    let mut times = BTreeMap::<&str, usize>::new();
    for one in &before {
        *times.entry(&one.module).or_default() += 1;
    }
    assert!(times.len() > 8, "{times:?}");
    assert!(times.values().all(|count| *count == 1), "{times:?}");
    let processes: BTreeSet<u32> = before.iter().map(|one| one.process).collect();
    assert_eq!(processes.len(), 2, "{before:?}");
    let overlap = |one: &Compiled, other: &Compiled| {
        one.process != other.process && one.begun < other.ended && other.begun < one.ended
    };
    let pairs = before
        .iter()
        .flat_map(|one| before.iter().map(move |other| (one, other)));
    let beside = pairs.filter(|(one, other)| overlap(one, other)).count();
    assert!(beside > 0, "one after the other: {before:?}");
    let kept = fs::read_dir(site.path("tessera/kernels")).unwrap();
    let kept = kept.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let kept = kept.filter(|name| name.ends_with(".cubin")).count();
    assert_eq!(kept, times.len());
    let [before, after] = compiled(&site, "second", line);
    assert!(
        before.is_empty() && after.is_empty(),
        "{before:?} {after:?}"
    );
}
