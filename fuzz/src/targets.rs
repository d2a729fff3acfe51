//! Readers of files and frames from outside, with a memory limit for each.
//!
//! The fuzzers and the tests of every change (`tests/suites/hostile`) share this file. They check that a reader
//! returns and stays within its memory limit, not what it returns.

use crate::memory;

/// One kind of input.
#[derive(Debug)]
pub struct Target {
    /// Name of the fuzzer and of its corpus directory.
    pub name: &'static str,
    /// Reads an input. Returns whether it was accepted.
    pub read: fn(&[u8]) -> bool,
    /// Bytes that any input may use.
    pub fixed: usize,
    /// Additional bytes allowed per byte of input.
    pub per_byte: usize,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// All kinds of input.
pub const TARGETS: [Target; 8] = [
    // A tensor's entry takes about 40 bytes of input and is stored in several maps.
    Target {
        name: "weights",
        read: |bytes| {
            let state = engine::fuzzing::state_header(bytes).is_ok();
            models::fuzzing::weights(bytes).is_ok() && state
        },
        fixed: 64 * KIB,
        per_byte: 48,
    },
    // An opcode of one byte makes a value of 32 bytes with three references, in lists that grow by doubling.
    Target {
        name: "torch",
        read: |bytes| models::fuzzing::torch_file(bytes).is_ok(),
        fixed: 1024 * KIB,
        per_byte: 256,
    },
    // `meta` is any JSON. A list of lists takes four places of 72 bytes for each `[0],`, and lists grow by doubling.
    Target {
        name: "manifest",
        read: |bytes| engine::fuzzing::manifest(bytes).is_ok(),
        fixed: 64 * KIB,
        per_byte: 192,
    },
    // Each value of a file becomes a key with its path, a row of the report, and possibly a sentence.
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
    // All hosts together have at most 65536 slots of eight bytes each.
    Target {
        name: "hostfile",
        read: |bytes| launcher::fuzzing::hostfile(bytes).is_ok(),
        fixed: 768 * KIB,
        per_byte: 64,
    },
    // A frame has at most 512 bytes during the handshake of two ranks, and 1 MiB after.
    Target {
        name: "frames",
        read: |bytes| {
            let rendezvous = engine::fuzzing::rendezvous_frames(bytes);
            let window = engine::fuzzing::window_frames(bytes);
            // Reads whole frames to the end of the input.
            let ends = |outcome: std::io::Result<()>| {
                outcome.is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof)
            };
            ends(rendezvous) || ends(window)
        },
        fixed: 2 * MIB,
        per_byte: 32,
    },
    // Patterns become automata of bounded size, whatever their length. Tokens are stored in a dozen maps.
    Target {
        name: "tokenizer",
        read: |bytes| models::fuzzing::tokenizer(bytes).is_ok(),
        fixed: 64 * MIB,
        per_byte: 512,
    },
    // A byte of a PNG encodes at most 8256 pixels, with 24 bytes each while decoding. A byte of a JPEG: 1024 pixels
    // with 48 bytes each.
    Target {
        name: "picture",
        read: image,
        fixed: 32 * MIB,
        per_byte: 8256 * 24,
    },
];

/// Most bytes of color profiles and texts, which headers do not count.
const METADATA_BYTES: u64 = 16 << 20;

/// Images. Large WebP, run-length-encoded BMP, GIF and TIFF files of one color are skipped, because decoding them takes long and
/// tests nothing.
fn image(bytes: &[u8]) -> bool {
    let marks: [&[u8]; 5] = [b"RIFF", b"BM", b"GIF8", b"II*\0", b"MM\0*"];
    let unbounded = marks.iter().any(|mark| bytes.starts_with(mark));
    let header = models::fuzzing::header(bytes);
    if unbounded && header.is_some_and(|header| header.pixels() > 1 << 20) {
        return false;
    }
    let (image, peak) = memory::peak(|| models::fuzzing::image(bytes));
    // The plan of a run counts what the header states.
    if let Some(header) = header.filter(|_| image.is_ok()) {
        let most = header.decode_bytes(false) + METADATA_BYTES;
        assert!(
            peak as u64 <= most,
            "{header:?} allows {most} bytes, decoding took {peak}"
        );
    }
    image.is_ok()
}

/// Kind of input with this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// Reads `bytes`. Returns whether they were accepted.
    ///
    /// # Panics
    /// When the reader exceeds its memory limit.
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
