use half::bf16;

use super::*;
use crate::rng::RandomStream;

/// Loop that runs every operation. All instruction sets must give the results of plain arrays.
struct Everything<'a>(&'a mut Vec<u32>);

impl Loop for Everything<'_> {
    const BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        const ELEMS: usize = 64;
        let stream = RandomStream::new(3, "lanes");
        let a: Vec<f32> = (0..ELEMS as u64).map(|i| stream.normal(i)).collect();
        let b: Vec<f32> = (0..ELEMS as u64).map(|i| stream.normal(100 + i)).collect();
        let halves: Vec<bf16> = a.iter().map(|&x| bf16::from_f32(x)).collect();
        let mut out = vec![0f32; ELEMS];
        let mut keep = |f: &dyn Fn(L::F, L::F, usize) -> L::F| {
            for i in (0..ELEMS).step_by(L::N) {
                l.store(&mut out[i..], f(l.load(&a[i..]), l.load(&b[i..]), i));
            }
            self.0.extend(out.iter().map(|x| x.to_bits()));
        };
        keep(&|a, b, _| l.add(a, b));
        keep(&|a, b, _| l.sub(a, b));
        keep(&|a, b, _| l.mul(a, b));
        keep(&|a, b, _| l.div(a, b));
        keep(&|a, _, _| l.sqrt(l.mul(a, a)));
        keep(&|a, _, _| l.square_error(a, l.mul(a, a)));
        let u = |f: &dyn Fn(L::U, L::U) -> L::U, a, b| l.float(f(l.bits(a), l.bits(b)));
        keep(&|a, b, _| u(&|a, b| l.add_u(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.mul_u(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.and(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.xor(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.max_u(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.max_halves(a, b), a, b));
        keep(&|a, b, _| u(&|a, b| l.xor(l.shr::<7>(a), l.shl::<9>(b)), a, b));
        keep(&|a, b, _| u(&|a, b| l.high_halves(a, b), a, b));
        let key = PageKey::new(stream, 1, 0);
        keep(&|_, _, i| {
            let pairs = l.pairs(key, 7 + i as u32);
            l.float(l.xor(l.word(key, 0, pairs), l.word(key, 2, pairs)))
        });
        keep(&|_, _, i| l.float(l.add_u(l.iota(), l.u(i as u32))));
        let signs: Vec<bf16> = [-1.5f32, 0.0, 2.5, 0.0]
            .repeat(ELEMS / 4)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let [signs, _] = l.widen(l.load_halves(&signs));
        let signs = l.shl::<16>(signs);
        keep(&|a, b, _| l.max(a, b));
        keep(&|a, b, _| u(&|a, b| l.min_u(a, b), a, b));
        keep(&|a, _, _| l.float(l.abs(l.bits(a))));
        keep(&|a, b, _| u(&|a, b| l.above(a, b), a, b));
        keep(&|a, _, _| l.float(l.negate(l.and(l.bits(a), signs), signs)));
        let table: [u8; 16] = std::array::from_fn(|i| 3 * i as u8);
        keep(&|a, _, _| l.float(l.look_up_16(&table, l.shr::<25>(l.bits(a)))));
        let table: [u32; 32] = std::array::from_fn(|i| 11 * i as u32);
        keep(&|a, _, _| l.float(l.look_up_32(&table, l.shr::<23>(l.bits(a)))));
        let table: [u32; 8] = std::array::from_fn(|i| 7 * i as u32);
        keep(&|a, _, _| l.float(l.look_up_8(&table, l.bits(a))));
        // Every byte, in an order that mixes near and far ones. The entries differ in all four bytes.
        let table = ByteTable::new(&std::array::from_fn(|i| {
            0x0103_0507u32.wrapping_mul(i as u32) ^ 0x5a
        }));
        let at: Vec<u8> = (0..256).map(|i| (37 * i) as u8).collect();
        let mut entries = vec![0f32; 256];
        for i in (0..256).step_by(4 * L::N) {
            for (vector, found) in l.look_up_bytes(&table, &at[i..]).into_iter().enumerate() {
                l.store(&mut entries[i + vector * L::N..], l.float(found));
            }
        }
        self.0.extend(entries.iter().map(|x| x.to_bits()));

        let mut wide = vec![0f32; ELEMS];
        let mut narrow = vec![bf16::ZERO; ELEMS];
        for i in (0..ELEMS).step_by(L::ITEM) {
            let [a, b] = l.widen(l.load_halves(&halves[i..]));
            l.store(&mut wide[i..], l.float(a));
            l.store(&mut wide[i + L::N..], l.float(b));
            l.store_halves(&mut narrow[i..], l.narrow([a, b]));
        }
        assert_eq!(narrow, halves);
        self.0.extend(wide.iter().map(|x| x.to_bits()));
        let [even, odd] = l.even_odd(l.load(&a), l.load(&a[L::N..]));
        let mut parts = [[0f32; ELEMS]; 2];
        l.store(&mut parts[0], even);
        l.store(&mut parts[1], odd);
        for i in 0..L::ITEM {
            assert_eq!(parts[i % 2][i / 2], a[i]);
        }
        let low = l.and(l.bits(l.load(&a)), l.u(0xffff));
        assert!(l.all_below(low, 0x1_0000) && !l.all_below(low, 1));
        let halves = l.u(0x1234_0567);
        assert!(l.all_halves_below(halves, 0x1235) && !l.all_halves_below(halves, 0x1234));
        // Negative numbers become 0, and others keep their lowest bytes.
        let numbers = [0, 255, 0x1234, u32::MAX].map(|x| l.u(x));
        let mut bytes = [1; ELEMS];
        l.store_bytes(&mut bytes, numbers);
        let expected = [0, 255, 0x34, 0].map(|byte| vec![byte; L::N]).concat();
        assert_eq!(bytes[..4 * L::N], expected);
        // Signed bytes from 127 on: the sign bit counts, that of -0 too.
        let (least, most) = (l.u(0x8700), l.u(0x8780));
        let signs = [1.0, -1.0, -0.0, f32::NEG_INFINITY].map(|x| l.f(x));
        for (number, expected) in [(least, [127, 126, 126, 126]), (most, [255, 0, 0, 0])] {
            l.store_signed_bytes(&mut bytes, [number; 4], signs, 127);
            assert_eq!(
                bytes[..4 * L::N],
                expected.map(|byte| vec![byte; L::N]).concat()
            );
        }
        let steps = l.add_u(l.iota(), l.u(0x8700));
        let alternating = l.float(l.xor(l.shl::<31>(l.iota()), l.u(1f32.to_bits())));
        l.store_signed_bytes(&mut bytes, [steps; 4], [alternating; 4], 127);
        let step = |i: usize| if i % 2 == 1 { 127 - i } else { 127 + i } as u8;
        let all: Vec<u8> = (0..L::N).map(step).collect();
        assert_eq!(bytes[..4 * L::N], all.repeat(4));
        // Sums and products that are exact.
        assert_eq!(
            l.largest(l.bits(l.near_mul_add(l.f(3.0), l.f(5.0), l.f(0.5)))),
            15.5f32.to_bits()
        );
        let counted = l.add_u(l.iota(), l.u(5));
        assert_eq!(l.largest(counted), 4 + L::N as u32);
        assert!(l.all_at_least(counted, 5) && !l.all_at_least(counted, 6));
        l.prefetch(a.as_ptr());
    }
}

#[test]
fn every_instruction_set_has_the_bits_of_scalar_code() {
    let results = |simd: Simd| {
        let mut out = Vec::new();
        simd.run(Everything(&mut out));
        out
    };
    let expected = results(Simd::Portable);
    for simd in Simd::available() {
        assert!(results(simd) == expected, "{simd:?}");
    }
}

#[test]
fn random_words_of_a_vector_equal_those_of_single_pairs() {
    struct Words<'a>(PageKey, &'a mut Vec<u32>);
    impl Loop for Words<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            // The index of the pairs wraps around within the vector.
            let mut out = vec![0f32; L::N];
            let pairs = l.pairs(self.0, u32::MAX - 3);
            for word in 0..3 {
                l.store(&mut out, l.float(l.word(self.0, word, pairs)));
                self.1.extend(out[..8].iter().map(|x| x.to_bits()));
            }
        }
    }
    let key = PageKey::new(RandomStream::new(1, "words"), 2, 3);
    let pairs = (0..8).map(|i| key.words((u32::MAX - 3).wrapping_add(i)));
    let pairs: Vec<_> = pairs.collect();
    let expected: Vec<u32> = (0..3)
        .flat_map(|w| pairs.iter().map(move |p| p[w]))
        .collect();
    for simd in Simd::available() {
        let mut out = Vec::new();
        simd.run(Words(key, &mut out));
        assert_eq!(out, expected, "{simd:?}");
    }
}
