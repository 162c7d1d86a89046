"""The codebooks of ggml's types of 1 to 3 bits: points whose coordinates are a few sizes, and how signs are stored.

A block names points of 4 or 8 values by number. Which points a type has was chosen by ggml, and no rule makes them,
but they are in ascending order, if the first coordinate counts least. So a set of them is all that is held here.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """The points of a type."""

    num_sizes: int
    """Of a coordinate, which is a number from 0."""
    num_values: int
    """Coordinates of a point."""
    members: str
    """A bit for each of all possible points, 1 for those that it has: compressed, in base 85."""


GRIDS = {
    "IQ1_S": Grid(
        3,
        8,
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2"
        "WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uB"
        "Y$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<h"
        "d(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH5"
        "2w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g"
        "3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z"
        "{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
        "0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}"
        "u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        "eu*|v(bMFD;1sQ1",
    ),
    "IQ2_XXS": Grid(
        3,
        8,
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI"
        "!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;"
        "MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2"
        "J=^JV`E{Z0D^#$6R7",
    ),
    "IQ2_XS": Grid(
        3,
        8,
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-f"
        "CU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF"
        "!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T"
        "}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q"
        "_=>7msuqjC",
    ),
    "IQ2_S": Grid(
        3,
        8,
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh"
        "^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l"
        "7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el"
        "6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM"
        "7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
    ),
    "IQ3_XXS": Grid(
        8,
        4,
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY"
        "<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|"
        "dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wE"
        "o20v5Uy_5",
    ),
    "IQ3_S": Grid(
        8,
        4,
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%"
        "@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@"
        "c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()"
        "?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB"
        "(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
    ),
}


@cache
def points(kind: str) -> Tensor:
    """The points of a type, uint8 [P, values]: the numbers of the sizes of each."""
    num_sizes, num_values, members = GRIDS[kind]
    packed = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(members))), dtype=torch.uint8)
    numbers = (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().nonzero()
    return (numbers // num_sizes ** torch.arange(num_values) % num_sizes).to(torch.uint8)


def signs_of_seven(indices: Tensor) -> Tensor:
    """The signs of eight values as bits of a byte, given seven of them [...]: an even number of them is set."""
    parity = indices
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    return indices | (parity & 1) << 7
