//! `--include` and `--exclude`: selection of machines and slots, written as `host1@host2:0,2`.

use super::Host;
use crate::error::Failure;
use crate::lang::{Text, both, text};

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
                both(
                    "--include and --exclude contradict each other",
                    "--include 与 --exclude 互相矛盾",
                ),
                both(
                    "both choose machines of the hostfile",
                    "两者都从 hostfile 中选择机器",
                ),
            )
            .next(both("keep one of them", "请只保留其中一个")));
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
            text!(
                "{flag} {text} leaves no machine",
                "{flag} {text} 之后没有剩余的机器"
            ),
            both(
                "it leaves out every slot of the hostfile",
                "它排除了 hostfile 中的所有 slot",
            ),
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
    let bad = |what: Text| {
        Failure::usage(
            text!("{flag} {text}: {what}", "{flag} {text}：{what}"),
            both(
                "separate machines with @, and put slots after a colon: host1@host2:0,2",
                "请用 @ 分隔机器，并在冒号后写 slot：host1@host2:0,2",
            ),
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
                    known(name).ok_or_else(|| {
                        bad(text!(
                            "'{name}' is not in the hostfile",
                            "'{name}' 不在 hostfile 中"
                        ))
                    })?,
                    Some(slots),
                ),
                None => {
                    return Err(bad(text!(
                        "'{part}' is not in the hostfile",
                        "'{part}' 不在 hostfile 中"
                    )));
                }
            },
        };
        if parts.iter().any(|(name, _)| *name == host.name) {
            return Err(bad(text!("{} is named twice", "{} 出现了两次", host.name)));
        }
        let slots = match slots {
            None => None,
            Some(slots) => {
                let mut chosen = Vec::new();
                for slot in slots.split(',') {
                    let number = slot.parse().ok().filter(|slot| host.slots.contains(slot));
                    let number = number.ok_or_else(|| {
                        bad(text!(
                            "{} has the slots 0 to {}, not '{slot}'",
                            "{} 的 slot 为 0 到 {}，没有 '{slot}'",
                            host.name,
                            host.slots.len() - 1
                        ))
                    })?;
                    if chosen.contains(&number) {
                        return Err(bad(text!(
                            "slot {number} of {} is named twice",
                            "{} 的 slot {number} 出现了两次",
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
