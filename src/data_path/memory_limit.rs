//! Whether memory that is about to be reserved fits the limits of the control groups that this process is in.
//!
//! Beyond such a limit the kernel gives no error: it kills a process of the group. So the limit is looked at first.

use std::path::Path;

use crate::error::{Errno, Result, TransportError};

/// What is not asked for but comes on top: page tables, and what the process needs for itself.
const MARGIN: u64 = 1 << 20;

/// Where a hierarchy of control groups shows its limits.
struct Hierarchy {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Memory that the kernel takes back before it kills, as named in `memory.stat`.
    reclaimable: &'static [&'static str],
    /// Limit and usage of swap, where they are apart.
    swap: Option<(&'static str, &'static str)>,
}

const VERSION_2: Hierarchy = Hierarchy {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: &["active_file", "inactive_file", "slab_reclaimable"],
    swap: Some(("memory.swap.max", "memory.swap.current")),
};
const VERSION_1: Hierarchy = Hierarchy {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_active_file", "total_inactive_file"],
    swap: None,
};

/// Refuses to reserve more than the control groups of this process leave. Where nothing can be learned nothing is refused.
///
/// # Errors
/// [`TransportError::System`] with the group, its limit, and what to do.
pub(crate) fn check(bytes: usize) -> Result<()> {
    check_below(Path::new("/"), bytes as u64)
}

fn check_below(root: &Path, bytes: u64) -> Result<()> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for line in groups.lines() {
        // As in `0::/user.slice` and `4:memory:/docker/1234`.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let hierarchy = match controllers {
            "" => &VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => &VERSION_1,
            _ => continue,
        };
        // Its own limit and those of all groups around it.
        for ancestor in Path::new(group).ancestors() {
            let folder = root.join(hierarchy.mount).join(ancestor.strip_prefix("/").unwrap_or(ancestor));
            let Some((limit, room)) = room(root, hierarchy, &folder) else { continue };
            if bytes.saturating_add(MARGIN) > room {
                return Err(TransportError::System {
                    call: "the check of the memory limit",
                    what: format!("control group {}", ancestor.display()),
                    errno: Errno(libc::ENOMEM),
                    remedy: format!(
                        "{bytes} bytes are asked for, its {} is {limit} and leaves {room} bytes; beyond it the kernel kills \
                         the process: raise it (--memory of a container, MemoryMax= in a systemd unit), or use a smaller \
                         depth or capacity",
                        hierarchy.limit
                    ),
                });
            }
        }
    }
    Ok(())
}

/// The limit of a group and what it leaves; `None` where there is none.
fn room(root: &Path, hierarchy: &Hierarchy, folder: &Path) -> Option<(u64, u64)> {
    let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and version 1 shows a number beyond all memory.
    let limit = number(hierarchy.limit).filter(|limit| *limit < 1 << 60)?;
    let usage = number(hierarchy.usage)?;
    let named = |text: &str, name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
    };
    let statistics = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 =
        hierarchy.reclaimable.iter().filter_map(|name| named(&statistics, &format!("{name} "))).sum();
    let swap = hierarchy.swap.map_or(0, |(most, used)| {
        let memory = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let free = named(&memory, "SwapFree:").unwrap_or(0) * 1024;
        free.min(number(most).unwrap_or(u64::MAX).saturating_sub(number(used).unwrap_or(0)))
    });
    Some((limit, limit.saturating_sub(usage.saturating_sub(reclaimable)).saturating_add(swap)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system with these files.
    fn files(list: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in list {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_tightest_group_counts_and_what_can_be_taken_back_does_not() {
        let root = files(&[
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("proc/meminfo", "MemFree: 1 kB\nSwapFree:        1024 kB\n"),
            ("sys/fs/cgroup/outer/memory.max", "20971520\n"),
            ("sys/fs/cgroup/outer/memory.current", "18874368\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 5\nactive_file 1048576\ninactive_file 2097152\n"),
            ("sys/fs/cgroup/outer/memory.swap.max", "0\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "18874368\n"),
        ]);
        // 2 MiB are free and 3 can be taken back; one is kept as a margin.
        assert_eq!(check_below(root.path(), 4 << 20), Ok(()));
        let error = check_below(root.path(), (4 << 20) + 1).unwrap_err().to_string();
        for part in ["control group /outer failed", "memory.max is 20971520 and leaves 5242880", "raise it (--memory"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
        // The swap that a group may use counts.
        std::fs::write(root.path().join("sys/fs/cgroup/outer/memory.swap.max"), "max\n").unwrap();
        assert_eq!(check_below(root.path(), (4 << 20) + 1), Ok(()));
    }

    #[test]
    fn the_older_hierarchy_counts_too() {
        let root = files(&[
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/1\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9999999999\n"),
            ("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "4194304\n"),
            ("sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", "1048576\n"),
        ]);
        assert_eq!(check_below(root.path(), 2 << 20), Ok(()));
        assert!(
            check_below(root.path(), 3 << 20).unwrap_err().to_string().contains("memory.limit_in_bytes is 4194304")
        );
    }

    #[test]
    fn where_nothing_is_known_nothing_is_refused() {
        assert_eq!(check_below(files(&[]).path(), u64::MAX), Ok(()));
        let root = files(&[("proc/self/cgroup", "0::/\nnonsense\n"), ("sys/fs/cgroup/memory.current", "1\n")]);
        assert_eq!(check_below(root.path(), u64::MAX), Ok(()));
    }
}
