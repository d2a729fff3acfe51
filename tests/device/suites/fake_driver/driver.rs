//! The driver's own rules, and the report of its GPUs.

use std::process::Command;

use device_tests::fake_driver;
use serde_json::Value;

use crate::site::{Site, driver};

/// Every rule of the driver, each in a process of its own.
pub(crate) fn the_driver_keeps_its_rules() {
    let directory = driver();
    let program = fake_driver::build_contract(directory).unwrap();
    let list = Command::new(&program).output().unwrap();
    let names = String::from_utf8(list.stdout).unwrap();
    assert!(names.lines().count() > 10, "{names}");
    for name in names.lines() {
        let output = Command::new(&program).arg(name).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name}: {text}");
    }
}

pub(crate) fn doctor_reports_the_driver_and_its_gpus() {
    let site = Site::new();
    let (code, text) = site.run(&[], "doctor --json");
    assert_eq!(code, Some(0), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["cuda"]["problem"], Value::Null, "{text}");
    assert_eq!(report["gpus"].as_array().unwrap().len(), 2);
    let gpu = &report["gpus"][1];
    assert_eq!(
        (&gpu["name"], &gpu["ordinal"]),
        (&"Fake GPU".into(), &1.into())
    );
    assert_eq!(
        (&gpu["index"], &gpu["multiprocessors"]),
        (&1.into(), &4.into())
    );
    assert_eq!(gpu["memory_bytes"], 2u64 << 30);
    let (_, text) = site.run(&[("CUDA_VISIBLE_DEVICES", "")], "doctor");
    assert!(
        text.contains("shows no GPU") || text.contains("hides every GPU"),
        "{text}"
    );
}
