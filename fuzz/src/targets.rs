//! The readers of files and frames from outside, and how much memory each may take for an input.
//!
//! The fuzzers and the tests of every change (`tests/suites/hostile`) share this file. What a reader makes of an input
//! is its own affair; that it returns, and within its memory, is what is checked.

use crate::memory;

/// One kind of input.
#[derive(Debug)]
pub struct Target {
    /// Name of the fuzzer and of the folder of its corpus.
    pub name: &'static str,
    /// Reads an input; whether it is accepted.
    pub read: fn(&[u8]) -> bool,
    /// Bytes that any input may take.
    pub fixed: usize,
    /// Bytes that may be taken for each byte of the input.
    pub per_byte: usize,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// All kinds.
pub const TARGETS: [Target; 7] = [
    // A tensor is named in about 40 bytes, and kept in several maps.
    Target {
        name: "weights",
        read: |bytes| {
            let state = engine::fuzzing::state_header(bytes).is_ok();
            models::fuzzing::weights(bytes).is_ok() && state
        },
        fixed: 64 * KIB,
        per_byte: 48,
    },
    // `meta` is any JSON: a list of lists takes four places of 72 bytes for each `[0],`, and lists grow by doubling.
    Target {
        name: "manifest",
        read: |bytes| engine::fuzzing::manifest(bytes).is_ok(),
        fixed: 64 * KIB,
        per_byte: 192,
    },
    // Each value of a file becomes a key with its path, a row of the report and perhaps a sentence.
    Target {
        name: "config",
        read: |bytes| {
            let endings =
                ["json", "yaml", "toml"].map(|ending| launcher::fuzzing::config(bytes, ending));
            let model = models::fuzzing::config(bytes).is_ok();
            model || endings.iter().any(Result::is_ok)
        },
        fixed: 512 * KIB,
        per_byte: 256,
    },
    // All machines together have at most 65536 slots, of eight bytes each.
    Target {
        name: "hostfile",
        read: |bytes| launcher::fuzzing::hostfile(bytes).is_ok(),
        fixed: 768 * KIB,
        per_byte: 64,
    },
    // A frame between ranks that know each other has at most 1 MiB; before, 512 bytes.
    Target {
        name: "frames",
        read: |bytes| {
            let rendezvous = engine::fuzzing::rendezvous_frames(bytes);
            let window = engine::fuzzing::window_frames(bytes);
            // Whole frames to the end of the input.
            let ends = |outcome: std::io::Result<()>| {
                outcome.is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof)
            };
            ends(rendezvous) || ends(window)
        },
        fixed: 2 * MIB,
        per_byte: 32,
    },
    // Patterns become automata of a bounded size, whatever their length; tokens stand in a dozen maps.
    Target {
        name: "tokenizer",
        read: |bytes| models::fuzzing::tokenizer(bytes).is_ok(),
        fixed: 64 * MIB,
        per_byte: 512,
    },
    // A byte of a PNG is 8256 pixels at most, with 24 bytes each while they are decoded; one of a JPEG 1024, with 48.
    Target {
        name: "picture",
        read: picture,
        fixed: 32 * MIB,
        per_byte: 8256 * 24,
    },
];

/// A WebP or a BMP of runs may be one colour and large; reading many such would test nothing but patience.
fn picture(bytes: &[u8]) -> bool {
    let unbounded = bytes.starts_with(b"RIFF") || bytes.starts_with(b"BM");
    if unbounded && models::fuzzing::pixels(bytes).is_some_and(|pixels| pixels > 1 << 20) {
        return false;
    }
    models::fuzzing::picture(bytes).is_ok()
}

/// The kind called `name`.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// Reads `bytes`; whether they are accepted.
    ///
    /// # Panics
    /// The reader took more memory than it may.
    pub fn check(&self, bytes: &[u8]) -> bool {
        let (accepted, peak) = memory::peak(|| (self.read)(bytes));
        let most = self.fixed + self.per_byte * bytes.len();
        assert!(
            peak <= most,
            "{} took {peak} bytes for an input of {}, at most {most} may be",
            self.name,
            bytes.len()
        );
        accepted
    }
}
