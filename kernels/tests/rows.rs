//! Tests of operations on tables of rows: gather, scatter, replace.

mod common;

use common::{Case, assert_close, config, dtypes, reference as naive, tolerance};
use kernels::{Backend, DType, KernelError, Shape, Tag, Tensor};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn gathered_rows_are_the_table_rows(
        (rows, n, c) in (1..30usize, 0..80usize, 0..20usize),
        dtype in dtypes(),
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let table = case.operand(&[rows, c], dtype, 1.0);
        let (ids, index) = case.index(n, rows);
        let got = case.cpu.gather_rows(&table.tensor, &ids).unwrap();
        prop_assert_eq!((got.shape(), got.dtype()), (Shape::from([n, c]), dtype));
        let want: Vec<f64> =
            index.iter().flat_map(|i| table.values[i * c..][..c].to_vec()).collect();
        prop_assert_eq!(common::values_of(&got), want);
    }

    #[test]
    fn scattered_rows_add_up(
        (rows, n, c) in (1..30usize, 0..80usize, 1..20usize),
        (dtype, out) in (dtypes(), dtypes()),
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let x = case.operand(&[n, c], dtype, 1.0);
        let (ids, index) = case.index(n, rows);
        let got = case.cpu.scatter_add_rows(&x.tensor, &ids, rows, out).unwrap();
        prop_assert_eq!((got.shape(), got.dtype()), (Shape::from([rows, c]), out));
        let (mut want, mut size) = (vec![0.0; rows * c], vec![0.0; rows * c]);
        for (i, row) in index.iter().enumerate() {
            for j in 0..c {
                want[row * c + j] += x.values[i * c + j];
                size[row * c + j] += x.values[i * c + j].abs();
            }
        }
        assert_close("scatter", &got, &want, |i| tolerance::sum(out, n, want[i], size[i]));
    }

    /// Gathering is linear in the table, and scattering is its transpose: <gather(t), y> = <t, scatter(y)> for all t
    /// and y. So each is the gradient of the other.
    #[test]
    fn scatter_is_the_gradient_of_gather(
        (rows, n, c) in (1..20usize, 1..40usize, 1..10usize),
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let t = case.operand(&[rows, c], DType::F32, 1.0);
        let y = case.operand(&[n, c], DType::F32, 1.0);
        let (ids, _) = case.index(n, rows);
        let g = case.cpu.gather_rows(&t.tensor, &ids).unwrap();
        let s = case.cpu.scatter_add_rows(&y.tensor, &ids, rows, DType::F32).unwrap();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let left = dot(&common::values_of(&g), &y.values);
        let right = dot(&t.values, &common::values_of(&s));
        let size = dot(&naive::absolute(&y.values), &vec![1.0; n * c]);
        prop_assert!((left - right).abs() <= tolerance::sum(DType::F32, n, left, size));
    }

    #[test]
    fn replaced_rows_change_and_the_others_stay(
        (rows, n, c) in (1..30usize, 0..10usize, 1..20usize),
        dtype in dtypes(),
        with_rows: bool,
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let base = case.operand(&[rows, c], dtype, 1.0);
        let new = case.operand(&[n, c], dtype, 1.0);
        let (ids, index) = case.index(n, rows);
        let source = with_rows.then_some(&new.tensor);
        let got = case.cpu.replace_rows(&base.tensor, &ids, source).unwrap();
        let mut want = base.values.clone();
        for (i, row) in index.iter().enumerate() {
            for j in 0..c {
                want[row * c + j] = if with_rows { new.values[i * c + j] } else { 0.0 };
            }
        }
        prop_assert_eq!(common::values_of(&got), want);
        prop_assert_eq!(common::values_of(&base.tensor), base.values);
    }
}

#[test]
fn any_element_type_can_be_gathered() {
    let case = Case::new(0);
    let table: Vec<i32> = (0..12).collect();
    let table = Tensor::from_slice(common::pool(&case.cpu), Tag::Activations, [3, 2, 2], &table);
    let ids = common::ints_tensor(&case.cpu, &[2, 0]);
    let got = case.cpu.gather_rows(&table.unwrap(), &ids).unwrap();
    assert_eq!(got.shape(), Shape::from([2, 2, 2]));
    assert_eq!(got.as_slice::<i32>(), [8, 9, 10, 11, 0, 1, 2, 3]);
}

#[test]
fn rows_are_written_in_place_unless_the_tensor_is_shared() {
    let case = Case::new(0);
    let pool = common::pool(&case.cpu).clone();
    let ints = |shape: [usize; 2], values: &[i32]| {
        Tensor::from_slice(&pool, Tag::Cache, shape, values).unwrap()
    };
    let ids = common::ints_tensor(&case.cpu, &[2]);
    let rows = ints([1, 2], &[8, 9]);
    let base = ints([3, 2], &[0, 1, 2, 3, 4, 5]);
    let place = base.as_bytes().as_ptr();
    let written = case.cpu.write_rows(base, &ids, &rows).unwrap();
    assert_eq!(written.as_slice::<i32>(), [0, 1, 2, 3, 8, 9]);
    assert_eq!(written.as_bytes().as_ptr(), place);
    let held = written.clone();
    let ids = common::ints_tensor(&case.cpu, &[0]);
    let copied = case.cpu.write_rows(written, &ids, &rows).unwrap();
    assert_eq!(copied.as_slice::<i32>(), [8, 9, 2, 3, 8, 9]);
    assert_eq!(held.as_slice::<i32>(), [0, 1, 2, 3, 8, 9]);
    let outside = common::ints_tensor(&case.cpu, &[3]);
    let error = case.cpu.write_rows(held, &outside, &rows).unwrap_err();
    assert!(matches!(
        error,
        KernelError::Index {
            index: 3,
            rows: 3,
            ..
        }
    ));
}

#[test]
fn indices_out_of_range_are_errors_that_name_them() {
    let mut case = Case::new(0);
    let x = case.operand(&[2, 3], DType::F32, 1.0).tensor;
    for bad in [4, -1, i32::MIN] {
        let ids = common::ints_tensor(&case.cpu, &[0, bad]);
        let table = case.operand(&[4, 3], DType::F32, 1.0).tensor;
        let cpu = &case.cpu;
        for result in [
            cpu.gather_rows(&table, &ids),
            cpu.scatter_add_rows(&x, &ids, 4, DType::F32),
            cpu.replace_rows(&table, &ids, Some(&x)),
        ] {
            match result.unwrap_err() {
                KernelError::Index { index, rows: 4, .. } => assert_eq!(index, i64::from(bad)),
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn each_matrix_is_transposed() {
    let case = Case::new(0);
    let values: Vec<i32> = (0..12).collect();
    let x = Tensor::from_slice(
        common::pool(&case.cpu),
        Tag::Activations,
        [2, 2, 3],
        &values,
    );
    let got = case.cpu.transpose_each(&x.unwrap()).unwrap();
    assert_eq!(got.shape(), Shape::from([2, 3, 2]));
    assert_eq!(
        got.as_slice::<i32>(),
        [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    );
    let back = case.cpu.transpose_each(&got).unwrap();
    assert_eq!(back.as_slice::<i32>(), values);
    let flat = common::ints_tensor(&case.cpu, &[1, 2]);
    assert!(case.cpu.transpose_each(&flat).is_err());
}
