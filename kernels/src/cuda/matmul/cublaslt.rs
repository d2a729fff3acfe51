//! cuBLASLt on one GPU. Descriptors and the algorithm are created once per [`Shape`] and stored. A product allocates
//! nothing on the device; its workspace is an argument.
#![expect(unsafe_code, reason = "calls into cuBLASLt, which was found before")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaContext;
use cudarc::driver::result as driver;

use super::{ALIGNMENT, Epilogue, Multiply, Shape, WORKSPACE_BYTES};
use crate::DType;
use crate::cuda::error::{CudaError, Result};
use crate::cuda::gpu::Gpu;
use crate::cuda::launch::Address;
use crate::cuda::library::{Library, Search, find};

/// Maximum stored shapes. Batches of different lengths keep bringing new ones; a dropped shape is prepared again.
const KEPT: usize = 4096;

/// cuBLASLt handle for one GPU, with the algorithms chosen so far for product shapes.
#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    context: Arc<CudaContext>,
    /// Prepared products by shape; `None` for shapes that the library refuses.
    prepared: Mutex<HashMap<Shape, Option<Prepared>>>,
    /// Set when the GPU will never become idle: destroying the handle would wait for it.
    abandoned: AtomicBool,
}

// SAFETY: several threads may use a handle at the same time. Descriptors are used under the lock only.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// Descriptors of a shape and the algorithm chosen for it.
#[derive(Debug)]
struct Prepared {
    description: Description,
    a: Layout,
    b: Layout,
    y: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn failed(call: &str) -> impl Fn(result::CublasError) -> CudaError + '_ {
    move |error| CudaError::Driver {
        call: format!("cuBLASLt {call}"),
        code: format!("{:?}", error.0),
    }
}

/// Version of the loaded library, e.g. `13.1.0`.
pub(in crate::cuda) fn version() -> Option<String> {
    // SAFETY: asks the dynamic linker only.
    let present = unsafe { sys::is_culib_present() };
    // SAFETY: the library is present, so its functions are found; the call needs no handle.
    let code = present.then(|| unsafe { sys::cublasLtGetVersion() })?;
    // Version 12.0 changed the encoding from XXYYZZ to XXXYYZZ; the same divisions read both.
    Some(format!(
        "{}.{}.{}",
        code / 10_000,
        code % 10_000 / 100,
        code % 100
    ))
}

impl CublasLt {
    /// Finds and opens the cuBLASLt library and creates a handle for `gpu`.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] with the places tried, and the library's error when it does not start.
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
        gpu.bind()?;
        let handle = result::create_handle().map_err(failed("start"))?;
        Ok(Self {
            handle,
            context: Arc::clone(gpu.stream().context()),
            prepared: Mutex::default(),
            abandoned: AtomicBool::new(false),
        })
    }

    /// Queues a matrix product on the GPU's compute stream. Returns `false`, with nothing queued, if the
    /// library has no algorithm for it. The answer for one shape is always the same.
    ///
    /// # Safety
    /// The addresses must be memory of this GPU of the sizes that the product states, and `workspace` memory of
    /// `workspace_bytes`. All of it must stay allocated until the stream has passed the product.
    ///
    /// # Errors
    /// When the workspace is smaller than [`WORKSPACE_BYTES`], an address of the product is not a multiple of
    /// [`ALIGNMENT`], or the library fails.
    pub unsafe fn multiply(
        &self,
        gpu: &Gpu,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        let Multiply {
            a,
            b,
            y,
            bias,
            aux,
            alpha,
            beta,
            ..
        } = product;
        let aligned = [*a, *b, *y, *bias, *aux, workspace]
            .iter()
            .all(|address| address.0.is_multiple_of(ALIGNMENT));
        if workspace_bytes < WORKSPACE_BYTES || !aligned {
            return Err(CudaError::Driver {
                call: "cuBLASLt product".to_owned(),
                code: format!("{workspace_bytes} bytes of workspace, {product:?}"),
            });
        }
        gpu.bind()?;
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if !prepared.contains_key(&product.shape) {
            if prepared.len() >= KEPT {
                prepared.clear();
            }
            let new = self.prepare(product)?;
            prepared.insert(product.shape, new);
        }
        let Some(Some(prepared)) = prepared.get(&product.shape) else {
            return Ok(false);
        };
        prepared.description.point_to(product)?;
        let pointer = |address: Address| address.0 as *const c_void;
        // Row-major y = a b^T is column-major y^T = b a^T, so the library's A is b here.
        // SAFETY: the caller vouches for the addresses. Descriptors live and do not change under the lock. Scalars
        // and descriptors are read before the call returns.
        let queued = unsafe {
            result::matmul(
                self.handle,
                prepared.description.0,
                std::ptr::from_ref(alpha).cast(),
                std::ptr::from_ref(beta).cast(),
                pointer(*b),
                prepared.b.0,
                pointer(*a),
                prepared.a.0,
                pointer(*y),
                prepared.y.0,
                y.0 as *mut c_void,
                prepared.y.0,
                &raw const prepared.algorithm,
                workspace.0 as *mut c_void,
                WORKSPACE_BYTES as usize,
                gpu.stream().cu_stream().cast(),
            )
        };
        queued.map_err(failed("product"))?;
        Ok(true)
    }

    /// Prepares a shape. `None` if the library has no algorithm for it.
    fn prepare(&self, product: &Multiply) -> Result<Option<Prepared>> {
        let shape = &product.shape;
        let (Some(kind), Some(out)) = (kind(shape.dtype), kind(shape.out)) else {
            return Ok(None);
        };
        let Shape { m, n, k, .. } = *shape;
        // A row-major matrix is a column-major matrix whose columns are its lines.
        let stored = |transposed: bool, rows: usize| match transposed {
            true => [rows, k],
            false => [k, rows],
        };
        let a = Layout::new(kind, stored(shape.transpose_a, m), shape.a_line)?;
        let b = Layout::new(kind, stored(shape.transpose_b, n), shape.b_line)?;
        let y = Layout::new(out, [n, m], shape.y_line)?;
        let description = Description::new(shape)?;
        description.point_to(product)?;
        let algorithm = self.choose(&description, [&b, &a, &y])?;
        Ok(algorithm.map(|algorithm| Prepared {
            description,
            a,
            b,
            y,
            algorithm,
        }))
    }

    fn choose(
        &self,
        description: &Description,
        [a, b, c]: [&Layout; 3],
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference::new()?;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            WORKSPACE_BYTES,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, ALIGNMENT as u32)?;
        }
        // Parts of a split sum are added in f32, in the workspace. Parts stored in y would be rounded to its dtype.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            scheme as u32,
        )?;
        let mut best = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        // SAFETY: all handles are alive; one result is requested and there is space for one.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                1,
                best.as_mut_ptr(),
                &raw mut found,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(None);
        }
        status.result().map_err(failed("choice of an algorithm"))?;
        // SAFETY: bytes that were not written are zero, a valid value of this plain type.
        let best = unsafe { best.assume_init() };
        let usable = found > 0 && best.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        Ok(usable.then_some(best.algo))
    }
}

impl CublasLt {
    /// Leaves the handle to the end of the process, because the GPU still waits for a dead rank.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if *self.abandoned.get_mut() {
            return;
        }
        let bound = self.context.bind_to_thread();
        let waited = bound.and_then(|()| driver::ctx::synchronize());
        let prepared = self.prepared.get_mut();
        prepared.unwrap_or_else(PoisonError::into_inner).clear();
        if waited.is_ok() {
            // SAFETY: created once, destroyed once, with nothing queued. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

fn kind(dtype: DType) -> Option<sys::cudaDataType_t> {
    match dtype {
        DType::BF16 => Some(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Some(sys::cudaDataType_t::CUDA_R_16F),
        DType::F32 => Some(sys::cudaDataType_t::CUDA_R_32F),
        _ => None,
    }
}

/// Matmul descriptor: operand orientation and epilogue.
#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(shape: &Shape) -> Result<Self> {
        use sys::cublasLtEpilogue_t as Code;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // Sums are f32; f32 operands do not use TF32.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        let new = result::create_matmul_desc(compute, scale).map_err(failed("description"))?;
        let new = Self(new);
        // The library's A is b here, whose lines run along k unless it is transposed.
        let operation = |transposed: bool| i32::from(transposed);
        new.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            operation(!shape.transpose_b),
        )?;
        new.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            operation(shape.transpose_a),
        )?;
        let epilogue = match shape.epilogue {
            Epilogue::None => Code::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => Code::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { aux: false } => Code::CUBLASLT_EPILOGUE_GELU,
            Epilogue::Gelu { aux: true } => Code::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::GeluBias { aux: false } => Code::CUBLASLT_EPILOGUE_GELU_BIAS,
            Epilogue::GeluBias { aux: true } => Code::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        };
        new.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if shape.epilogue.has_aux() {
            let line = shape.n as i64;
            new.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, line)?;
        }
        Ok(new)
    }

    /// Sets the addresses that are part of the descriptor.
    fn point_to(&self, product: &Multiply) -> Result<()> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if product.shape.epilogue.has_bias() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias.0)?;
        }
        if product.shape.epilogue.has_aux() {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            self.set(attribute, product.aux.0)?;
        }
        Ok(())
    }

    /// Sets an attribute whose type has the size of `T`.
    fn set<T: Copy>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the descriptor is alive, and the library checks the size against that of the attribute.
        unsafe {
            result::set_matmul_desc_attribute(
                self.0,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(failed("attribute of a description"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// Layout of a column-major matrix.
#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(
        kind: sys::cudaDataType_t,
        [rows, columns]: [usize; 2],
        column_elems: usize,
    ) -> Result<Self> {
        let new =
            result::create_matrix_layout(kind, rows as u64, columns as u64, column_elems as i64);
        new.map(Self).map_err(failed("layout"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Limits for the choice of an algorithm.
#[derive(Debug)]
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self> {
        let new = result::create_matmul_pref();
        new.map(Self).map_err(failed("preference"))
    }

    /// Sets an attribute whose type has the size of `T`.
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<()> {
        // SAFETY: the preference is alive, and the library checks the size against that of the attribute.
        unsafe {
            result::set_matmul_pref_attribute(
                self.0,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(failed("attribute of a preference"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _unused_outcome = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
