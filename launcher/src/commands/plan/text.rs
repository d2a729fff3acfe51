//! Text output of a plan.

use crate::lang::{Text, both, text};
use crate::memory::{Kinds, PARTS, PhaseBytes, RankMemory, kind_name};
use crate::plan::MemoryCheck;
use crate::units::bytes;
use std::collections::BTreeMap;
use std::fmt::Display;

/// Width of a tier's column in characters.
const WIDTH: usize = 10;

fn row(text: &mut String, name: impl Display, cells: [Text; 3]) {
    let [device, host, nvme] = cells;
    *text += &format!("        {name:<14}{device:>WIDTH$}{host:>WIDTH$}{nvme:>WIDTH$}\n");
}

fn shown(amount: u64) -> Text {
    match amount {
        0 => Text::literal("-"),
        amount => Text::literal(bytes(amount)),
    }
}

/// Table with the bytes of a rank by phase, and the peak by part. Kinds that make up a part follow it, indented. Kinds of
/// the process itself come last.
pub(super) fn table(memory: &RankMemory) -> String {
    let mut text = String::new();
    row(
        &mut text,
        both("peak per rank", "每个 rank 峰值"),
        [
            both("device", "设备").into(),
            both("host", "主机").into(),
            both("nvme", "nvme").into(),
        ],
    );
    for (phase, bytes) in &memory.phases {
        let totals = [&bytes.device, &bytes.host, &bytes.nvme].map(PhaseBytes::total);
        row(&mut text, phase.title(), totals.map(shown));
    }
    row(
        &mut text,
        both("of which", "其中"),
        [(); 3].map(|()| Text::default()),
    );
    let mut kinds = kinds(memory);
    for part in &PARTS {
        let most = memory.of_part(part);
        let shares = part.device.iter().map(|kind| (kind, kinds.remove(*kind)));
        let shares: Vec<_> = shares.collect();
        if most == [0; 3] {
            continue;
        }
        row(&mut text, kind_name(part.name), most.map(shown));
        // The first kind of a part has its name.
        for (kind, most) in shares.into_iter().skip(1) {
            if let Some(most) = most {
                let name = kind_name(kind);
                row(&mut text, text!("  {name}", "  {name}"), most.map(shown));
            }
        }
    }
    for (kind, most) in kinds {
        row(&mut text, kind_name(&kind), most.map(shown));
    }
    text
}

/// Peak of every kind on every tier.
fn kinds(memory: &RankMemory) -> BTreeMap<String, [u64; 3]> {
    let mut all: BTreeMap<String, [u64; 3]> = BTreeMap::new();
    let mut add = |tier: usize, kinds: &Kinds| {
        for (kind, amount) in kinds {
            let most = all.entry(kind.clone()).or_default();
            most[tier] = most[tier].max(*amount);
        }
    };
    for phase in memory.phases.values() {
        add(0, &phase.device);
        add(1, &phase.host);
        add(2, &phase.nvme);
    }
    all
}

/// Last line of the output: whether the run fits.
pub(super) fn verdict(fit: &MemoryCheck) -> String {
    let verdict = if fit.fits() {
        both("fits", "放得下")
    } else {
        both("DOES NOT FIT", "放不下")
    };
    let window = match fit.need.window {
        0 => Text::default(),
        window => text!(
            ", of which {} in /dev/shm",
            "，其中 /dev/shm 占 {}",
            bytes(window)
        ),
    };
    let label = both("need", "需要");
    format!("{label:<7} {}{window}   {verdict}\n", fit.needs())
}
