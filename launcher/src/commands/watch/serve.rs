//! `launcher watch --serve`: the report page of a run over HTTP, made anew from the files for every request.
//!
//! Only reading is possible: `/` is the page, `/state.json` what `--json` prints. An address that other machines reach asks
//! for a token, which the printed link holds. Connections have one thread each, few at a time, and end after a while:
//! the crate `tiny_http` has neither limit.

use super::{INTERVAL, look};
use crate::error::{Failure, output};
use crate::lang::{Text, both, text};
use crate::report::live;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Most bytes of a request.
const REQUEST_BYTES: usize = 8 << 10;
/// Longest wait for a request, and for its reader.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most connections at a time.
const CONNECTIONS: usize = 16;
/// Random bytes of a token.
const TOKEN_BYTES: usize = 16;
/// Seconds after which a page of a run in progress loads itself again.
const AGAIN_SECONDS: u64 = 5;

/// Serves the run in `directory` at `address` until the process is interrupted.
///
/// # Errors
/// The address is no address, or nothing can listen there (exit 2).
pub(super) fn run(directory: &Path, address: &str) -> Result<ExitCode, Failure> {
    let address = parsed(address)?;
    let failed = |error: io::Error| {
        Failure::usage(
            text!("cannot serve at {address}", "无法在 {address} 提供页面"),
            Text::literal(&error),
        )
        .next(both(
            "choose another port, or 0 for a free one",
            "请换一个端口，或用 0 选择空闲端口",
        ))
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let access = Access {
        token: (!address.ip().is_loopback())
            .then(token)
            .transpose()
            .map_err(failed)?,
    };
    output::print(&format!("{}\n", access.link(address)))?;
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Too many open files, or a client that left: others may follow.
                std::thread::sleep(INTERVAL);
                continue;
            };
            if open.fetch_add(1, Ordering::SeqCst) >= CONNECTIONS {
                open.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (access, open) = (&access, &open);
            scope.spawn(move || {
                // A client that leaves early is no failure of the server.
                drop(answer(stream, directory, access));
                open.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    Ok(ExitCode::SUCCESS)
}

/// The address of `text`: a port of this machine, or a host and a port.
fn parsed(text: &str) -> Result<SocketAddr, Failure> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    let found = text.to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| {
        Failure::usage(
            text!("--serve {text} is no address", "--serve {text} 不是地址"),
            both("a host and a port are needed", "需要主机和端口"),
        )
        .next(both(
            "--serve 7007, --serve 127.0.0.1:7007 or --serve 0.0.0.0:7007",
            "--serve 7007、--serve 127.0.0.1:7007 或 --serve 0.0.0.0:7007",
        ))
    })
}

fn token() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Who may read.
struct Access {
    /// What a request must name; `None` where only this machine reaches the address.
    token: Option<String>,
}

/// What a client gets.
struct Response {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl Access {
    fn link(&self, address: SocketAddr) -> String {
        match &self.token {
            None => format!("http://{address}/"),
            Some(token) => format!("http://{address}/?token={token}"),
        }
    }

    /// Whether a request for `query` of the host `host` may read. Without a token the host must be this machine: a page
    /// of another site could make a browser ask.
    fn allows(&self, query: &str, host: &str) -> bool {
        match &self.token {
            Some(token) => {
                let given = query
                    .split('&')
                    .find_map(|pair| pair.strip_prefix("token="));
                let given = given.unwrap_or_default().as_bytes();
                // Every byte is compared, so that the time tells nothing.
                let differing = given
                    .iter()
                    .zip(token.as_bytes())
                    .fold(0, |sum, (a, b)| sum | (a ^ b));
                given.len() == token.len() && differing == 0
            }
            None => {
                let name = match host.rsplit_once(':') {
                    Some((name, port)) if port.parse::<u16>().is_ok() => name,
                    _ => host,
                };
                let name = name.trim_start_matches('[').trim_end_matches(']');
                name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// The response to the head of a request.
    fn response(&self, head: &str, directory: &Path) -> Response {
        let plain = |status: &'static str| Response {
            status,
            kind: "text/plain; charset=utf-8",
            body: format!("{status}\n"),
        };
        let mut lines = head.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, target) = (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        );
        if method != "GET" && method != "HEAD" {
            return plain("405 Method Not Allowed");
        }
        let host = lines.find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("host").then(|| value.trim())
        });
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if !self.allows(query, host.unwrap_or_default()) {
            return plain("403 Forbidden");
        }
        let view = look(directory);
        match path {
            "/" => {
                let again = view.state.goes_on().then_some(AGAIN_SECONDS);
                Response {
                    status: "200 OK",
                    kind: "text/html; charset=utf-8",
                    body: live(directory, view.state.word(), again),
                }
            }
            "/state.json" => match serde_json::to_string(&view) {
                Ok(json) => Response {
                    status: "200 OK",
                    kind: "application/json",
                    body: json + "\n",
                },
                Err(_) => plain("500 Internal Server Error"),
            },
            _ => plain("404 Not Found"),
        }
    }
}

fn answer(mut stream: TcpStream, directory: &Path, access: &Access) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = Vec::new();
    let mut block = [0; 1024];
    while !head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let read = stream.read(&mut block)?;
        head.extend_from_slice(&block[..read]);
        if read == 0 || head.len() > REQUEST_BYTES {
            return Ok(());
        }
    }
    let head = String::from_utf8_lossy(&head);
    let Response { status, kind, body } = access.response(&head, directory);
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         Referrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    if !head.starts_with("HEAD") {
        stream.write_all(body.as_bytes())?;
    }
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_readers_of_this_machine_or_with_the_token_are_answered() {
        let here = Access { token: None };
        for (host, allowed) in [
            ("localhost:7007", true),
            ("127.0.0.1", true),
            ("[::1]:7007", true),
            ("evil.example", false),
            ("10.0.0.1:7007", false),
            ("", false),
        ] {
            assert_eq!(here.allows("", host), allowed, "{host}");
        }
        let there = Access {
            token: Some("abc".to_owned()),
        };
        for (query, allowed) in [
            ("token=abc", true),
            ("x=1&token=abc", true),
            ("token=abd", false),
            ("token=ab", false),
            ("token=abcd", false),
            ("", false),
        ] {
            assert_eq!(there.allows(query, "any"), allowed, "{query}");
        }
        assert_eq!(token().unwrap().len(), 2 * TOKEN_BYTES);
    }

    #[test]
    fn an_address_is_a_port_or_a_host_and_a_port() {
        let of = |text: &str| parsed(text).map(|address| address.to_string()).ok();
        assert_eq!(of("7007").as_deref(), Some("127.0.0.1:7007"));
        assert_eq!(of("0.0.0.0:80").as_deref(), Some("0.0.0.0:80"));
        assert_eq!(of("70070"), None);
        assert_eq!(of("nowhere"), None);
    }

    #[test]
    fn requests_other_than_reading_are_refused() {
        let access = Access { token: None };
        let status = |head: &str| access.response(head, Path::new("/nonexistent")).status;
        let host = "Host: localhost\r\n\r\n";
        assert!(status(&format!("POST / HTTP/1.1\r\n{host}")).starts_with("405"));
        assert!(status(&format!("GET /../etc HTTP/1.1\r\n{host}")).starts_with("404"));
        assert!(status("GET / HTTP/1.1\r\nHost: other.example\r\n\r\n").starts_with("403"));
        assert!(status(&format!("GET / HTTP/1.1\r\n{host}")).starts_with("200"));
    }
}
