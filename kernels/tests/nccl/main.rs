//! Tests of how ranks join a communicator, with a substitute for NCCL that the system's C compiler builds.
#![cfg(feature = "cuda")]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    reason = "a test binary, which asks its own library what happened in it"
)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::CudaError;
use kernels::cuda::launch::Address;
use kernels::cuda::library::Search;
use kernels::cuda::nccl::{Kind, Member, Nccl, UNIQUE_ID_BYTES};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn library() -> (TempDir, Arc<Nccl>) {
    let directory = tempfile::tempdir().unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-pthread", "-w", "-o"])
        .arg(directory.path().join("libnccl.so.2"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/library.c"))
        .status();
    assert!(status.unwrap().success());
    let search = Search {
        directories: vec![directory.path().into()],
        ..Search::default()
    };
    let nccl = Arc::new(Nccl::open(&search).unwrap());
    (directory, nccl)
}

/// Id of a communicator. Its first byte tells the substitute library how the ranks behave.
fn named(how: u8) -> [u8; UNIQUE_ID_BYTES] {
    let mut id = [0; UNIQUE_ID_BYTES];
    id[0] = how;
    id
}

fn meet(nccl: &Arc<Nccl>, how: u8, deadline: Duration) -> kernels::cuda::Result<Member> {
    nccl.meet(named(how), (1, 3), deadline, || Ok(()))
}

/// One test for all cases, because the library counts for the whole process.
#[test]
fn ranks_join_are_refused_or_time_out() {
    let (directory, nccl) = library();
    assert_eq!(nccl.version().unwrap(), "2.28.9");
    let refused = meet(&nccl, b'r', PATIENCE).unwrap_err().to_string();
    assert_eq!(
        refused,
        "NCCL joining the ranks failed: unhandled system error"
    );
    let unbound = || {
        Err::<(), _>(CudaError::NoDevice {
            reason: "gone".into(),
        })
    };
    let unbound = nccl.meet(named(b'n'), (1, 3), PATIENCE, unbound);
    assert!(matches!(unbound, Err(CudaError::NoDevice { .. })));

    let absent = meet(&nccl, b'a', SHORT).unwrap_err();
    assert_eq!(
        absent.to_string(),
        "NCCL had not joined rank 1 with all 3 ranks after 0.05 s: a rank did not come, or cannot be reached"
    );

    // A rank that comes after the deadline is not waited for, and leaves by itself.
    let late = meet(&nccl, b'l', SHORT).unwrap_err();
    assert!(matches!(late, CudaError::NotJoined { waited: SHORT, .. }));
    drop(meet(&nccl, b'n', PATIENCE).unwrap());
    // SAFETY: the file was opened before, so its initializers have run.
    let library =
        unsafe { libloading::Library::new(directory.path().join("libnccl.so.2")) }.unwrap();
    // SAFETY: this is its signature.
    let await_aborts: libloading::Symbol<'_, unsafe extern "C" fn(i32) -> i32> =
        unsafe { library.get(b"await_aborts") }.unwrap();
    // SAFETY: it may be called at any time.
    assert_eq!(unsafe { await_aborts(2) }, 2);

    // A rank joined but does not take part. The communicator is aborted once, and the call returns.
    let gather = |member: &Member| {
        let nowhere = (Address::NULL, Address::NULL);
        // SAFETY: this library touches no memory.
        unsafe { member.all_gather(nowhere, 0, Kind::U8, std::ptr::null_mut()) }
    };
    let stuck = meet(&nccl, b's', SHORT).unwrap();
    for _ in 0..2 {
        assert_eq!(
            gather(&stuck).unwrap_err().to_string(),
            "NCCL all-gather failed: the group was left: a rank is gone, or did not take part in time"
        );
    }
    // SAFETY: it may be called at any time.
    assert_eq!(unsafe { await_aborts(3) }, 3);
    drop(stuck);
    // SAFETY: it may be called at any time.
    assert_eq!(unsafe { await_aborts(3) }, 3);
    let taking_part = meet(&nccl, b'n', PATIENCE).unwrap();
    gather(&taking_part).unwrap();
}
