//! Bugs put into correct kernels: the emulator reports each of them.

use device_tests::emulator::{Emulator, Order};
use device_tests::seeded::{GEMM, check_gemm};

#[test]
fn the_correct_gemm_passes_in_every_order() {
    for order in [
        Order::Ascending,
        Order::Descending,
        Order::Random(1),
        Order::Random(2),
    ] {
        for shape in [[64, 64, 128], [70, 136, 72], [1, 8, 8], [256, 256, 256]] {
            let start = std::time::Instant::now();
            check_gemm(&mut Emulator::new(order), GEMM, shape).unwrap();
            println!("{shape:?} {:?}", start.elapsed());
        }
    }
}
