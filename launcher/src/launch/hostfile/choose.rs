//! `--include` and `--exclude`: selection of machines and slots, written as `host1@host2:0,2`.

use super::Host;
use crate::error::Failure;

/// The machines of `hosts` that the two flags select, in file order.
pub(super) fn choose(
    mut hosts: Vec<Host>,
    include: Option<&str>,
    exclude: Option<&str>,
) -> Result<Vec<Host>, Failure> {
    let (flag, text) = match (include, exclude) {
        (None, None) => return Ok(hosts),
        (Some(_), Some(_)) => {
            return Err(Failure::usage(
                "--include and --exclude contradict each other",
                "both choose machines of the hostfile",
            )
            .next("keep one of them"));
        }
        (Some(text), None) => ("--include", text),
        (None, Some(text)) => ("--exclude", text),
    };
    let parts = read(flag, text, &hosts)?;
    let named = |host: &Host| parts.iter().find(|(name, _)| *name == host.name);
    for host in &mut hosts {
        let kept = match (flag, named(host)) {
            ("--include", None) => Vec::new(),
            ("--include", Some((_, slots))) => slots.clone().unwrap_or_else(|| host.slots.clone()),
            (_, None) => continue,
            (_, Some((_, None))) => Vec::new(),
            (_, Some((_, Some(out)))) => {
                let left = host.slots.iter().filter(|slot| !out.contains(slot));
                left.copied().collect()
            }
        };
        host.slots = kept;
    }
    hosts.retain(|host| !host.slots.is_empty());
    if hosts.is_empty() {
        return Err(Failure::usage(
            format!("{flag} {text} leaves no machine"),
            "it leaves out every slot of the hostfile",
        ));
    }
    Ok(hosts)
}

/// Parses `host:0,1@host2`: machines with their slots; all slots if none is given.
fn read(
    flag: &str,
    text: &str,
    hosts: &[Host],
) -> Result<Vec<(String, Option<Vec<usize>>)>, Failure> {
    let bad = |what: String| {
        Failure::usage(
            format!("{flag} {text}: {what}"),
            "separate machines with @, and put slots after a colon: host1@host2:0,2",
        )
    };
    let mut parts: Vec<(String, Option<Vec<usize>>)> = Vec::new();
    for part in text.split('@') {
        let known = |name: &str| hosts.iter().find(|host| host.name == name);
        // IPv6 addresses contain colons.
        let (host, slots) = match known(part) {
            Some(host) => (host, None),
            None => match part.rsplit_once(':') {
                Some((name, slots)) => (
                    known(name).ok_or_else(|| bad(format!("'{name}' is not in the hostfile")))?,
                    Some(slots),
                ),
                None => return Err(bad(format!("'{part}' is not in the hostfile"))),
            },
        };
        if parts.iter().any(|(name, _)| *name == host.name) {
            return Err(bad(format!("{} is named twice", host.name)));
        }
        let slots = match slots {
            None => None,
            Some(slots) => {
                let mut chosen = Vec::new();
                for slot in slots.split(',') {
                    let number = slot.parse().ok().filter(|slot| host.slots.contains(slot));
                    let number = number.ok_or_else(|| {
                        bad(format!(
                            "{} has the slots 0 to {}, not '{slot}'",
                            host.name,
                            host.slots.len() - 1
                        ))
                    })?;
                    if chosen.contains(&number) {
                        return Err(bad(format!(
                            "slot {number} of {} is named twice",
                            host.name
                        )));
                    }
                    chosen.push(number);
                }
                chosen.sort_unstable();
                Some(chosen)
            }
        };
        parts.push((host.name.clone(), slots));
    }
    Ok(parts)
}
