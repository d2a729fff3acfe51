//! Matrix products by cuBLASLt, for frozen weights and as the ceiling that our own kernels are compared with.
#![expect(unsafe_code, reason = "calls into cuBLASLt, which was found before")]

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;

use super::error::{CudaError, Result};
use super::gpu::{Gpu, Memory};
use super::launch::Address;
use super::library::{Library, Search, find};
use crate::DType;

/// Workspace of a product: what Hopper's kernels want.
const WORKSPACE_BYTES: usize = 32 << 20;

/// cuBLASLt on one GPU.
#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: Memory,
}

/// `y [t, n] = x [t, k] @ w [n, k]^T` in one 16-bit type with f32 sums, the choice of algorithm made once.
#[derive(Debug)]
pub struct Linear {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulHeuristicResult_t,
}

fn failed(call: &str) -> impl Fn(result::CublasError) -> CudaError + '_ {
    move |error| CudaError::Driver {
        call: format!("cuBLASLt {call}"),
        code: format!("{:?}", error.0),
    }
}

/// The version of the loaded library, for example `13.1.0`.
pub(super) fn version() -> Option<String> {
    // SAFETY: asks the dynamic linker only.
    let present = unsafe { sys::is_culib_present() };
    // SAFETY: the library is present, so its functions are found; the call needs no handle.
    let code = present.then(|| unsafe { sys::cublasLtGetVersion() })?;
    // 12.0 changed the coding from XXYYZZ to XXXYYZZ, which the same divisions read.
    Some(format!(
        "{}.{}.{}",
        code / 10_000,
        code % 10_000 / 100,
        code % 100
    ))
}

impl CublasLt {
    /// Finds and opens the library.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] with the places tried.
    pub fn open(gpu: &Gpu, search: &Search) -> Result<Self> {
        let found = find(Library::CublasLt, search);
        // SAFETY: asks the dynamic linker only.
        let present = found.path.is_some() && unsafe { sys::is_culib_present() };
        if !present {
            let tried = found.tried();
            return Err(CudaError::LibraryMissing {
                library: Library::CublasLt.name(),
                tried,
            });
        }
        let workspace = gpu.allocate(WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(failed("start"))?;
        Ok(Self { handle, workspace })
    }

    /// Prepares a product of these sizes.
    ///
    /// # Errors
    /// When the type is not 16-bit or the library has no algorithm.
    pub fn linear(&self, dtype: DType, t: u64, n: u64, k: u64) -> Result<Linear> {
        let kind = match dtype {
            DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
            DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
            other => {
                let call = format!("cuBLASLt product in {other}");
                return Err(CudaError::Driver {
                    call,
                    code: "only 16-bit types".into(),
                });
            }
        };
        // Row-major y = x w^T is column-major y^T = w x^T: A = w (transposed), B = x, C = y.
        let layout = |rows, columns| {
            result::create_matrix_layout(kind, rows, columns, rows as i64).map_err(failed("layout"))
        };
        let layouts = [layout(k, n)?, layout(k, t)?, layout(n, t)?];
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        let description =
            result::create_matmul_desc(compute, scale).map_err(failed("description"))?;
        let transposed = 1i32;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute is a 32-bit enumeration.
        unsafe {
            result::set_matmul_desc_attribute(
                description,
                attribute,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            )
        }
        .map_err(failed("transpose"))?;
        let algorithm = self.choose(description, layouts)?;
        Ok(Linear {
            description,
            layouts,
            algorithm,
        })
    }

    fn choose(
        &self,
        description: sys::cublasLtMatmulDesc_t,
        [a, b, c]: [sys::cublasLtMatrixLayout_t; 3],
    ) -> Result<sys::cublasLtMatmulHeuristicResult_t> {
        let preference = result::create_matmul_pref().map_err(failed("preference"))?;
        let bytes = WORKSPACE_BYTES as u64;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the attribute is a 64-bit size.
        let set = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                attribute,
                (&raw const bytes).cast(),
                size_of::<u64>(),
            )
        };
        let mut best = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        // SAFETY: all handles are alive; one result is asked for and there is room for one.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description,
                a,
                b,
                c,
                c,
                preference,
                1,
                best.as_mut_ptr(),
                &raw mut found,
            )
        };
        // SAFETY: the preference is not used again.
        let freed = unsafe { result::destroy_matmul_pref(preference) };
        set.and(status.result())
            .and(freed)
            .map_err(failed("choice of an algorithm"))?;
        if found == 0 {
            let call = "cuBLASLt choice of an algorithm".to_owned();
            return Err(CudaError::Driver {
                call,
                code: "none for these sizes".into(),
            });
        }
        // SAFETY: one result was written; the type is plain data that zero bytes are valid for.
        Ok(unsafe { best.assume_init() })
    }

    /// Queues a prepared product.
    ///
    /// # Safety
    /// The addresses must be device memory of the prepared sizes and live until the stream has passed the product.
    ///
    /// # Errors
    /// When the library refuses.
    pub unsafe fn run(
        &self,
        gpu: &Gpu,
        linear: &Linear,
        x: Address,
        w: Address,
        y: Address,
    ) -> Result<()> {
        let (alpha, beta) = (1f32, 0f32);
        let pointer = |address: Address| address.0 as *const c_void;
        let [a, b, c] = linear.layouts;
        // SAFETY: the caller vouches for the operands; scalars are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                linear.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(w),
                a,
                pointer(x),
                b,
                pointer(y),
                c,
                y.0 as *mut c_void,
                c,
                &raw const linear.algorithm.algo,
                self.workspace.address().0 as *mut c_void,
                WORKSPACE_BYTES,
                gpu.stream().cu_stream().cast(),
            )
        }
        .map_err(failed("product"))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. The workspace is freed after it, which waits for the device.
        let _unused_outcome = unsafe { result::destroy_handle(self.handle) };
        let _unused_outcome = driver::ctx::synchronize();
    }
}

impl Drop for Linear {
    fn drop(&mut self) {
        for layout in self.layouts {
            // SAFETY: created once, destroyed once.
            let _unused_outcome = unsafe { result::destroy_matrix_layout(layout) };
        }
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { result::destroy_matmul_desc(self.description) };
    }
}
