//! Built-in PTX of the sm_80 family, so that a driver is enough to run.
//!
//! `scripts/build-ptx.sh` makes it from the same sources, with an NVRTC old enough for
//! [`super::probe::MINIMUM_DRIVER`]. A test compares the hash of every source with the hash that its PTX was made
//! from. The bundle is an xz file of records: a line `name hash bytes`, then the PTX. xz is used because modules
//! differ little, but repeat at distances beyond deflate's 32 KiB.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::sync::OnceLock;

use super::module::Module;

/// Virtual architecture that the built-in PTX is compiled for. Newer GPUs run it too.
pub const ARCH: &str = "compute_80";

static BUNDLE: &[u8] = include_bytes!("sm_80.bundle");

/// Precompiled PTX of one module, with the hash of its source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Hash of the source that the PTX was compiled from, as [`source_hash`] computes it.
    pub source_hash: String,
    /// PTX assembly text of the module.
    pub ptx: String,
}

/// Precompiled PTX of modules, keyed by module name.
pub type Bundle = BTreeMap<String, Entry>;

/// Hash of a module's complete source text, which tells whether its precompiled PTX is up to date.
#[must_use]
pub fn source_hash(module: &Module) -> String {
    blake3::hash(module.source().as_bytes()).to_hex()[..32].to_owned()
}

/// The PTX bundle that is built into this crate. It is decompressed on first use.
#[must_use]
pub fn bundle() -> &'static Bundle {
    static UNPACKED: OnceLock<Bundle> = OnceLock::new();
    // A damaged bundle reads as empty. The test that compares hashes fails then.
    UNPACKED.get_or_init(|| unpack(BUNDLE).unwrap_or_default())
}

/// Built-in PTX of a module. `None` if the bundle lacks it, or has PTX of another source text.
#[must_use]
pub fn built_in(module: &Module) -> Option<&'static str> {
    let entry = bundle().get(&module.name())?;
    (entry.source_hash == source_hash(module)).then_some(&*entry.ptx)
}

/// Decompresses a PTX bundle and reads its entries.
///
/// # Errors
/// When the bundle is damaged.
pub fn unpack(mut bytes: &[u8]) -> io::Result<Bundle> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "damaged PTX bundle");
    let mut text = Vec::new();
    lzma_rs::xz_decompress(&mut bytes, &mut text).map_err(|_| damaged())?;
    let text = String::from_utf8(text).map_err(|_| damaged())?;
    let mut bundle = Bundle::new();
    let mut rest = &*text;
    while !rest.is_empty() {
        let (header, body) = rest.split_once('\n').ok_or_else(damaged)?;
        let mut words = header.split(' ');
        let mut word = || words.next().ok_or_else(damaged);
        let (name, hash, bytes) = (word()?, word()?, word()?);
        let bytes: usize = bytes.parse().map_err(|_| damaged())?;
        let (ptx, following) = body.split_at_checked(bytes).ok_or_else(damaged)?;
        let entry = Entry {
            source_hash: hash.to_owned(),
            ptx: ptx.to_owned(),
        };
        bundle.insert(name.to_owned(), entry);
        rest = following;
    }
    Ok(bundle)
}

/// Uncompressed text of a bundle: name, source hash, length and PTX of each module. [`unpack`] reads it after
/// compression.
#[must_use]
pub fn records(bundle: &Bundle) -> String {
    let mut text = String::new();
    for (name, Entry { source_hash, ptx }) in bundle {
        // Writing to a string cannot fail.
        let _ok = write!(text, "{name} {source_hash} {}\n{ptx}", ptx.len());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::module::Family;

    #[test]
    fn a_bundle_survives_packing_and_damage_is_noticed() {
        let entry = |ptx: &str| Entry {
            source_hash: "ab".into(),
            ptx: ptx.into(),
        };
        let bundle: Bundle = [("a".into(), entry("one\ntwo")), ("b".into(), entry(""))].into();
        let mut packed = Vec::new();
        lzma_rs::xz_compress(&mut records(&bundle).as_bytes(), &mut packed).unwrap();
        assert_eq!(unpack(&packed).unwrap(), bundle);
        assert!(unpack(&packed[..packed.len() / 2]).is_err());
    }

    #[test]
    fn the_oldest_driver_reads_the_built_in_ptx() {
        // PTX 8.2 came with CUDA 12.2.
        for (name, entry) in bundle() {
            let mut lines = entry.ptx.lines();
            let version = lines.find_map(|line| line.strip_prefix(".version "));
            assert_eq!(version, Some("8.2"), "{name}: run scripts/build-ptx.sh");
        }
    }

    #[test]
    fn every_module_has_ptx_of_its_current_source() {
        let mut expected: Vec<String> = Vec::new();
        for module in Family::ALL.iter().flat_map(|family| family.modules()) {
            let entry = bundle().get(&module.name());
            let hash = entry.map(|entry| &*entry.source_hash);
            let now = source_hash(&module);
            assert_eq!(
                hash,
                Some(&*now),
                "{}: run scripts/build-ptx.sh",
                module.name()
            );
            expected.push(module.name());
        }
        expected.sort();
        let built_in: Vec<&String> = bundle().keys().collect();
        assert_eq!(
            built_in,
            expected.iter().collect::<Vec<_>>(),
            "run scripts/build-ptx.sh"
        );
    }
}
