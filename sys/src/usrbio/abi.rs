//! The structures and functions of `hf3fs_usrbio.h`, as far as reading needs them.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

/// Reading a hole is an error instead of zeros.
pub(super) const FORBID_READ_HOLES: u64 = 2;

/// `struct hf3fs_iov`: memory shared with the 3FS daemon.
#[repr(C)]
pub(super) struct Iov {
    pub(super) base: *mut u8,
    handle: *mut c_void,
    id: [c_char; 16],
    mount_point: [c_char; 256],
    size: usize,
    block_size: usize,
    numa: c_int,
}

/// `struct hf3fs_ior`: a ring.
#[repr(C)]
pub(super) struct Ior {
    iov: Iov,
    handle: *mut c_void,
    mount_point: [c_char; 256],
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    flags: u64,
}

/// `struct hf3fs_cqe`: the answer to a request.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Cqe {
    index: i32,
    reserved: i32,
    /// Bytes, or a negative errno.
    pub(super) result: i64,
    pub(super) userdata: *const c_void,
}

impl Cqe {
    pub(super) const EMPTY: Self =
        Self { index: 0, reserved: 0, result: 0, userdata: std::ptr::null() };
}

// What the C compiler makes of them on a 64-bit machine.
const _: () = assert!(size_of::<Iov>() == 312 && size_of::<Ior>() == 600 && size_of::<Cqe>() == 24);

/// Declares the table of functions and how each is found.
macro_rules! calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions. They can be called for as long as the table lives.
        pub(super) struct Calls {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: libloading::Library,
        }

        impl Calls {
            pub(super) fn load(path: &Path) -> Result<Self, libloading::Error> {
                // SAFETY: what a shared library does when it is loaded is its own affair; the path is the
                // operator's choice, and the default is 3FS's own library.
                let library = unsafe { libloading::Library::new(path)? };
                $(
                    // SAFETY: the type is the one that 3FS's header declares for this name.
                    let $field = unsafe {
                        *library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            concat!($symbol, "\0").as_bytes(),
                        )?
                    };
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

calls! {
    extract_mount_point = "hf3fs_extract_mount_point": fn(*mut c_char, c_int, *const c_char) -> c_int;
    iovcreate = "hf3fs_iovcreate": fn(*mut Iov, *const c_char, usize, usize, c_int) -> c_int;
    iovdestroy = "hf3fs_iovdestroy": fn(*mut Iov);
    iorcreate4 = "hf3fs_iorcreate4":
        fn(*mut Ior, *const c_char, c_int, bool, c_int, c_int, c_int, u64) -> c_int;
    iordestroy = "hf3fs_iordestroy": fn(*mut Ior);
    reg_fd = "hf3fs_reg_fd": fn(c_int, u64) -> c_int;
    dereg_fd = "hf3fs_dereg_fd": fn(c_int);
    prep_io = "hf3fs_prep_io":
        fn(*const Ior, *const Iov, bool, *mut c_void, c_int, usize, u64, *const c_void) -> c_int;
    submit_ios = "hf3fs_submit_ios": fn(*const Ior) -> c_int;
    wait_for_ios = "hf3fs_wait_for_ios":
        fn(*const Ior, *mut Cqe, c_int, c_int, *const libc::timespec) -> c_int;
}
