//! What sandboxes send and people write about the network: questions and answers of names, policies, ports.

use crate::Target;
use netpolicy::{Policy, Publication};

/// A message of the domain name system, or text.
pub const NETWORK: Target = Target {
    name: "network",
    run: |data| {
        let _asks = netpolicy::read_question(data);
        let text = String::from_utf8_lossy(data);
        if let Ok(policy) = Policy::parse(&text.lines().collect::<Vec<_>>()) {
            assert_eq!(Policy::parse(policy.lines()).ok(), Some(policy));
        }
        if let Ok(publication) = Publication::parse(&text)
            && publication.host.is_ipv4()
        {
            assert_eq!(Publication::parse(&publication.to_string()).ok(), Some(publication));
        }
    },
    seeds: || {
        let question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03www\x07example\x03org\x00\x00\x01\x00\x01";
        let mut answer = question.to_vec();
        answer[2] = 0x81;
        answer[7] = 2;
        answer.extend(b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x04\x01a\xc0\x10");
        answer.extend(b"\xc0\x2d\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xcb\x00\x71\x0a");
        let policy =
            b"tcp:*.example.org:443\nudp:192.0.2.0/24:53-54\npypi,before=2025-01-01,deny=a_b\n";
        vec![question.to_vec(), answer, policy.to_vec(), b"0.0.0.0:8080:80".to_vec()]
    },
};
