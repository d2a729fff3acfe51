//! Finds the process that listens on a port, as far as this user may see.

use std::fs;

/// State of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// Id and name of the process that listens on `port` of this machine.
pub(super) fn owner(port: u16) -> Option<(u32, String)> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| listening(&table, port))
        .collect();
    let sockets: Vec<String> = inodes
        .iter()
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let Ok(open) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        let holds = open.flatten().any(|file| {
            fs::read_link(file.path()).is_ok_and(|link| {
                sockets
                    .iter()
                    .any(|socket| *socket == link.to_string_lossy())
            })
        });
        if holds {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_string()));
        }
    }
    None
}

/// Inodes of the sockets that listen on `port`, from a table in `/proc/net`.
fn listening(table: &str, port: u16) -> Vec<String> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.get(1)?.rsplit(':').next()?;
        let is_it = u16::from_str_radix(at, 16) == Ok(port) && *fields.get(3)? == LISTEN;
        is_it.then(|| fields.get(9).map(ToString::to_string))?
    };
    table.lines().skip(1).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_table_of_the_kernel_is_parsed() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0\n   \
             1: 0100007F:733C 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0\n";
        assert_eq!(listening(table, 29_500), ["4711"]);
        assert!(listening(table, 80).is_empty());
        assert!(listening("x\ny z\n", 80).is_empty());
    }
}
