//! Extended attributes on their way into a layer: what is kept, what is stripped, what is refused.
//!
//! Attributes of overlayfs in a source are never kept as they are: a forged redirect would show files
//! that the user of the layer must not see.

use crate::path;
use crate::progress::Progress;
use layer::tree::Xattr;
use layer::{Error, ErrorKind, Result};

/// What attributes of overlayfs mean in this source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Nothing: they are somebody else's.
    Foreign,
    /// The source is the upper directory of an overlay mount; `trusted.overlay.*` was written by
    /// the kernel.
    Upper,
}

/// What overlayfs says about an inode of an upper directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// The directory hides what is below it.
    pub opaque: bool,
    /// The directory shows what lower layers have at this path.
    pub redirect: Option<Vec<u8>>,
    /// The file hides this name.
    pub whiteout: bool,
}

/// The most bytes of a value; EROFS counts them in 16 bits.
const MAX_VALUE_BYTES: usize = 65_535;
/// The most bytes of a full name, as in the kernel.
const MAX_NAME_BYTES: usize = 255;

/// Sorts attributes by name and applies the policy. `at` is the inode's path, for messages.
pub(crate) fn admit(
    policy: Policy,
    at: &[u8],
    mut xattrs: Vec<Xattr>,
    progress: &dyn Progress,
) -> Result<(Vec<Xattr>, Marks)> {
    let mut marks = Marks::default();
    let mut failure = None;
    xattrs.retain(|xattr| {
        if let Some(mark) = xattr.name.strip_prefix(b"trusted.overlay.")
            && policy == Policy::Upper
        {
            match upper_mark(mark, &xattr.value, &mut marks) {
                Ok(true) => {}
                Ok(false) => stripped(at, xattr, progress),
                Err(text) => {
                    let text = format!("{}: {text}", path::show(at));
                    failure.get_or_insert(Error::new(ErrorKind::Unsupported, text));
                }
            }
            return false;
        }
        let foreign =
            xattr.name.starts_with(b"trusted.overlay.") || xattr.name.starts_with(b"user.overlay.");
        if foreign {
            stripped(at, xattr, progress);
        }
        !foreign
    });
    if let Some(error) = failure {
        return Err(error);
    }
    for xattr in &xattrs {
        check(at, xattr)?;
    }
    xattrs.sort();
    if xattrs.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(Error::invalid(format!("{} has one attribute twice", path::show(at))));
    }
    Ok((xattrs, marks))
}

/// Takes note of a mark of overlayfs; false for one that is not known.
fn upper_mark(mark: &[u8], value: &[u8], marks: &mut Marks) -> Result<bool, &'static str> {
    match mark {
        // "x" only says that there are whiteouts made of attributes inside.
        b"opaque" => marks.opaque = value == b"y",
        b"redirect" => marks.redirect = Some(value.to_vec()),
        b"whiteout" => marks.whiteout = true,
        b"metacopy" => return Err("its content is in a lower layer (the overlay has metacopy on)"),
        b"origin" | b"impure" | b"nlink" | b"uuid" | b"upper" | b"whiteouts" | b"xwhiteouts"
        | b"protattr" | b"verity" => {}
        _ => return Ok(false),
    }
    Ok(true)
}

fn stripped(at: &[u8], xattr: &Xattr, progress: &dyn Progress) {
    progress.notice(&format!(
        "{}: attribute {} belongs to overlayfs and is left out",
        path::show(at),
        show_name(&xattr.name)
    ));
}

fn check(at: &[u8], xattr: &Xattr) -> Result<()> {
    let refuse = |why: &str| {
        let name = show_name(&xattr.name);
        Err(Error::invalid(format!("{}: attribute {name} {why}", path::show(at))))
    };
    let known = matches!(&xattr.name[..], b"system.posix_acl_access" | b"system.posix_acl_default")
        || [&b"user."[..], b"trusted.", b"security."]
            .iter()
            .any(|prefix| xattr.name.starts_with(prefix) && xattr.name.len() > prefix.len());
    if !known {
        return refuse("is in a namespace that a layer cannot hold");
    }
    if xattr.name.len() > MAX_NAME_BYTES || xattr.name.contains(&0) {
        return refuse("has a name that is no attribute name (at most 255 bytes, none zero)");
    }
    if xattr.value.len() > MAX_VALUE_BYTES {
        return refuse("has a value of 64 KiB or more");
    }
    Ok(())
}

fn show_name(name: &[u8]) -> String {
    path::show(name).trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    fn xattr(name: &[u8], value: &[u8]) -> Xattr {
        Xattr { name: name.to_vec(), value: value.to_vec() }
    }

    #[test]
    fn foreign_marks_are_stripped_and_own_ones_are_read() {
        let given = vec![
            xattr(b"user.z", b"1"),
            xattr(b"trusted.overlay.opaque", b"y"),
            xattr(b"user.overlay.redirect", b"/etc"),
            xattr(b"security.capability", b"\x01\x00"),
        ];
        let kept = vec![given[3].clone(), given[0].clone()];
        let (foreign, marks) = admit(Policy::Foreign, b"a", given.clone(), &Silent).unwrap();
        assert_eq!((&foreign, &marks), (&kept, &Marks::default()));
        let (upper, marks) = admit(Policy::Upper, b"a", given, &Silent).unwrap();
        assert_eq!(upper, kept);
        assert!(marks.opaque && marks.redirect.is_none());
        let metacopy = vec![xattr(b"trusted.overlay.metacopy", b"")];
        assert!(admit(Policy::Upper, b"a", metacopy, &Silent).is_err());
    }

    #[test]
    fn what_erofs_cannot_hold_names_the_path() {
        for bad in [
            xattr(b"system.nfs4_acl", b""),
            xattr(b"user.", b""),
            xattr(&[&b"user."[..], &[b'x'; 251]].concat(), b""),
            xattr(b"user.big", &vec![1; 65_536]),
        ] {
            let error = admit(Policy::Foreign, b"dir/file", vec![bad], &Silent).unwrap_err();
            assert!(error.to_string().contains("/dir/file"), "{error}");
        }
        let longest = xattr(&[&b"user."[..], &[0xff; 250]].concat(), &vec![1; 65_535]);
        assert!(admit(Policy::Foreign, b"f", vec![longest], &Silent).is_ok());
    }
}
